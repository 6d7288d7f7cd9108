"""The table of docs/doctor.md: ``python tests/_support/tools/doctor/findings_table.py`` prints it."""

from parallel3d.tools.doctor.finding import all_checks


def table() -> str:
    """In Markdown, by area."""
    rows = ["| area | finding | severity | why it matters | what to do |", "| --- " * 5 + "|"]
    for each in sorted(all_checks(), key=lambda each: each.area):
        cells = (each.area, f"`{each.name}`", str(each.severity), each.why, each.do)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
