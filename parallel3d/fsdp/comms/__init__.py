"""When and by what collectives run: asynchronous works, streams, the user's collectives and hooks."""
