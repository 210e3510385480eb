"""Lessons, one file each: a page whose numbers are computed by the code that plans.

A lesson is a module with
    NAME             its public name
    TITLE            a Text, in English and Chinese
    INPUTS           the whole numbers that a reader may change, each with its default
    page(**inputs)   the Page, for inputs that lie in their ranges; yields no second implementation of anything

`page.py` holds the shape of a Page, in both languages; `cli/lesson.py` prints it.
"""

from __future__ import annotations

from trainwright.registry import Registry

LESSONS = Registry("trainwright.lessons", "lesson")
