"""This module helps messages to be English whatever they count."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun in the singular or plural, such as "1 file" or "1,234 files".

    Args:
        number: how many there are.
        noun: the singular, such as "file".
        plural: the plural, if it is not the singular with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
