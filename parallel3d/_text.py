"""What an exception says, whoever wrote its class."""

__all__ = ["text_of"]


def text_of(error: BaseException) -> str:
    """``str(error)``; where that raises itself, which exception it raises."""
    try:
        return str(error)
    except Exception as another:
        return f"its text can't be read: __str__ raises {type(another).__name__}"
