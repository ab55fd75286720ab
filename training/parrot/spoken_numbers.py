"""Numbers and clock times in words."""

from __future__ import annotations


def spaced(text: str) -> list[str]:
    """Entries separated by white space."""
    return text.split()


ONES = spaced(
    """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen"""
)
TENS = ["", "", *spaced("twenty thirty forty fifty sixty seventy eighty ninety")]
HOURS = range(1, 13)


def in_words(number: int) -> str:
    """`number` (0 to 999,999) as it is read out: "three hundred five"."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + _rest(number % 10)
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + _rest(number % 100)
    return f"{in_words(number // 1000)} thousand" + _rest(number % 1000)


def _rest(number: int) -> str:
    return f" {in_words(number)}" if number else ""


CLOCK_TIMES = [
    *(f"{in_words(hour)} o'clock" for hour in HOURS),
    *(f"half past {in_words(hour)}" for hour in HOURS),
    *(
        f"{in_words(hour)} {in_words(minute)}"
        for hour in HOURS
        for minute in (10, 15, 20, 25, 30, 40, 45, 50, 55)
    ),
]
