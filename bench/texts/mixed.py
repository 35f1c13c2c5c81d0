"""Fifty short texts of different kinds and scripts, for checks of exactness.

A plain string is one user message; a list is a conversation, user first; ``RAW`` texts go to the
model as they are, without a chat template.
"""

from __future__ import annotations

CODE = [
    "Write a Python generator that yields the Fibonacci numbers below a limit.",
    "Explain what this does:\n```c\nfor (char *p = s; *p; p++) *p ^= 0x20;\n```",
    "Write an SQL query that lists customers without any order in 2023.",
    "Fix the bug: `def mean(xs): return sum(xs) / len(x)`",
    "Write a bash one-liner that counts the lines of all .py files below this folder.",
    'Turn this JSON into YAML: {"name": "pump-3", "limits": [0.5, 2, null], "on": true}',
    "Write a Rust function that reverses the words of a sentence.",
]
QUESTIONS = [
    "Why do leaves change their colour in autumn?",
    "What is the difference between a virus and a bacterium?",
    "How does a sewing machine make a stitch?",
    "Name five rivers in South America and the countries they cross.",
    "Who wrote the first computer program, and what was it for?",
    "What happens to a balloon that rises into the stratosphere?",
    "Which is heavier, a litre of water or a litre of olive oil, and why?",
    "List the planets from the largest to the smallest.",
]
MATHS = [
    "A train covers 210 km in 2.5 hours. How fast is it in metres per second?",
    "Solve for x: 3(x - 4) = 2x + 7. Show every step.",
    "What is the probability of at least one six in four throws of a die?",
    "Compute 17 * 23 - 144 / 12 + 5^2.",
    "Prove that the sum of two odd numbers is even.",
    "A rectangle is 4 cm longer than it is wide; its area is 96 cm². Find its sides.",
    "Write the first ten rows of Pascal's triangle.",
]
CHAT: list[str | list[str]] = [
    [
        "I have a job interview tomorrow and I am nervous.",
        "That is understandable. What kind of position is it?",
        "Night manager of a small hotel. What could they ask me?",
    ],
    [
        "Suggest a name for a grey cat.",
        "How about Ash?",
        "Too short. Give me five longer ones.",
    ],
    [
        "Let us play a game: you say a word, I say one that starts with its last letter.",
        "Good. I begin: lantern.",
        "Needle! Your turn.",
    ],
    [
        "Translate 'good morning' into Italian.",
        "Buongiorno.",
        "And into Portuguese, Swedish and Polish?",
    ],
    "Write a polite e-mail that asks a neighbour to keep the music down after ten.",
    "Tell me a story about a lighthouse keeper who is afraid of the dark. Keep it short.",
    "Plan a three-day walk in the hills for someone who has never hiked before.",
]
SCRIPTS = [
    "请用三句话介绍一下长城的历史。",
    "为什么天空是蓝色的？请解释给小学生听。",
    "把下面的句子翻译成英文：我昨天在图书馆借了两本书。",
    "اشرح لي كيف تتكوّن الغيوم في السماء.",
    "اكتب رسالة قصيرة إلى صديق تدعوه فيها إلى العشاء.",
    "Почему зимой дни короче, чем летом?",
    "Напиши короткое стихотворение о море.",
    "भारत की तीन बड़ी नदियों के नाम बताइए और उनके बारे में लिखिए।",
    "एक कप चाय बनाने की विधि क्या है?",
    "日本の四季について短く説明してください。",
    "「ありがとう」を丁寧に言う方法を三つ教えてください。",
    "한국의 전통 음식 세 가지를 소개해 주세요.",
    "Γιατί η θάλασσα είναι αλμυρή;",
    "עברית נכתבת מימין לשמאל. כתוב משפט אחד על ירושלים.",
    "What do these mean: 🚀🌕👩‍🚀? Answer with emoji only, then explain. 🙂",
    "🍅🧅🧄🫑 + 🔥 = ? Give me the recipe 👩🏽‍🍳",
]
RAW = [
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot =",
    "Once upon a time, in a village between two rivers,",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "<html>\n  <head>\n    <title>Garden diary</title>",
    "Die drei größten Städte Österreichs sind",
]
