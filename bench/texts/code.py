"""Sixteen HumanEval-style tasks: a Python signature and a docstring, the body left to the model."""

from __future__ import annotations

TASKS: dict[str, str] = {
    "running-median": '''def running_median(values: list[float], window: int) -> list[float]:
    """Return the median of every full window of `window` consecutive values.

    >>> running_median([1.0, 5.0, 2.0, 8.0], 3)
    [2.0, 5.0]
    """
''',
    "balanced-brackets": '''def first_unbalanced(text: str) -> int:
    """Return the index of the first bracket in text that has no partner, or -1 if all match.
    Brackets are (), [] and {}; every other character is ignored.

    >>> first_unbalanced("a(b[c]d)")
    -1
    >>> first_unbalanced("x)]")
    1
    """
''',
    "merge-intervals": '''from typing import List, Tuple


def merge_intervals(intervals: List[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Merge all overlapping or touching closed intervals and return them in ascending order.

    >>> merge_intervals([(8, 10), (1, 3), (2, 6)])
    [(1, 6), (8, 10)]
    """
''',
    "roman-numeral": '''def to_roman(number: int) -> str:
    """Convert a number between 1 and 3999 to a Roman numeral.

    >>> to_roman(1994)
    'MCMXCIV'
    """
''',
    "word-ladder-step": '''def one_letter_apart(first: str, second: str) -> bool:
    """Return True if the two words have the same length and differ in exactly one position.

    >>> one_letter_apart("cold", "cord")
    True
    >>> one_letter_apart("cold", "warm")
    False
    """
''',
    "prime-factors": '''def prime_factors(n: int) -> dict[int, int]:
    """Return a mapping from each prime factor of n (n >= 2) to its exponent.

    >>> prime_factors(360)
    {2: 3, 3: 2, 5: 1}
    """
''',
    "rotate-matrix": '''def rotate_clockwise(matrix: list[list[int]]) -> list[list[int]]:
    """Return a new matrix that is the input turned by 90 degrees clockwise.
    The matrix does not have to be square.

    >>> rotate_clockwise([[1, 2, 3], [4, 5, 6]])
    [[4, 1], [5, 2], [6, 3]]
    """
''',
    "longest-plateau": '''def longest_plateau(numbers: list[int]) -> int:
    """Return the length of the longest run of equal neighbours in the list, 0 if it is empty.

    >>> longest_plateau([2, 2, 7, 7, 7, 1])
    3
    """
''',
    "parse-duration": '''def parse_duration(text: str) -> int:
    """Turn a text such as "1h30m" or "45s" into a number of seconds.
    Hours, minutes and seconds are optional, but come in this order.

    >>> parse_duration("1h30m")
    5400
    >>> parse_duration("2m5s")
    125
    """
''',
    "group-anagrams": '''def group_anagrams(words: list[str]) -> list[list[str]]:
    """Put words that are anagrams of each other into one list. Lists appear in the order of
    their first word, and words keep their order.

    >>> group_anagrams(["tea", "tan", "eat", "nat", "bat"])
    [['tea', 'eat'], ['tan', 'nat'], ['bat']]
    """
''',
    "binary-search": '''def insertion_point(items: list[int], x: int) -> int:
    """Return the leftmost index at which x can be inserted into the sorted list items
    so that it stays sorted. Use binary search.

    >>> insertion_point([1, 3, 3, 5], 3)
    1
    """
''',
    "run-length": '''def run_length_encode(text: str) -> str:
    """Replace every run of the same character by the character and the length of the run.
    A run of length one is written without a number.

    >>> run_length_encode("aaabccd")
    'a3bc2d'
    """
''',
    "knapsack": '''def best_value(weights: list[int], values: list[int], capacity: int) -> int:
    """Return the largest total value of items whose total weight is at most capacity.
    Each item can be taken once.

    >>> best_value([3, 4, 2], [30, 50, 15], 6)
    65
    """
''',
    "caesar": '''def shift_letters(text: str, offset: int) -> str:
    """Shift every letter of the alphabet by offset places, wrapping around, and keep its case.
    All other characters stay as they are. offset may be negative.

    >>> shift_letters("Hello, Zoe!", 3)
    'Khoor, Crh!'
    """
''',
    "tree-depth": '''class Node:
    def __init__(self, value, left=None, right=None):
        self.value = value
        self.left = left
        self.right = right


def depth(root) -> int:
    """Return the number of nodes on the longest path from the root to a leaf, 0 for None.

    >>> depth(Node(1, Node(2, Node(3)), Node(4)))
    3
    """
''',
    "top-words": '''def most_common_words(text: str, count: int) -> list[tuple[str, int]]:
    """Return the `count` most frequent words of text with their frequencies, most frequent
    first; ties are in alphabetical order. Case does not matter, punctuation is no part of a word.

    >>> most_common_words("The cat and the dog. The end", 2)
    [('the', 3), ('and', 1)]
    """
''',
}

INSTRUCTION = "Complete the following Python function.\n\n```python\n{task}```"
