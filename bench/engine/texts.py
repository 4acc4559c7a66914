"""Texts whose next tokens implementations are asked for."""

TEXTS = (
    "The lighthouse keeper climbed the stairs each evening an hour before sunset, trimmed the wick, and wrote "
    "the direction of the wind in a ledger that nobody had asked him to keep. When the ferry company closed "
    "the route, he went on writing. His daughter found forty volumes in the attic, and on the last page of the "
    "last one a single line: calm, nothing to report.",
    "To compute the greatest common divisor of two integers, divide the larger by the smaller and replace the "
    "larger with the remainder. Repeat until the remainder is zero; the last divisor is the answer. For "
    "example, gcd(252, 105) = gcd(105, 42) = gcd(42, 21) = 21. The number of steps grows with the logarithm of "
    "the smaller number.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < "
    "len(right):\n        if left[i] <= right[j]:\n            result.append(left[i])\n            i += "
    "1\n        else:\n            result.append(right[j])\n            j += 1\n    "
    "result.extend(left[i:])\n    result.extend(right[j:])\n    return result\n",
    "Photosynthesis takes place in the chloroplasts of plant cells. Chlorophyll absorbs light, mostly in the "
    "blue and red parts of the spectrum, and uses its energy to split water into oxygen, protons and "
    "electrons. The oxygen leaves the leaf through its stomata; the electrons drive the reactions that turn "
    "carbon dioxide into sugar.",
    "Dear Ms. Alvarez,\n\nThank you for your order of 12 March. Two of the five chairs are not in stock and "
    "will be sent from our warehouse in Porto next week, at no extra cost. If you would rather have your money "
    "back, please answer this letter before Friday.\n\nYours sincerely,\nThe customer service team",
    "In 1804 the population of the world passed one billion. It took 123 years to reach two billion, 33 years "
    "to reach three, and only 12 years to go from six to seven. Growth has slowed since: the number of "
    "children that a woman has on average fell from about five in 1960 to fewer than two and a half today.",
    "Question: A train leaves the station at 9:40 and arrives at 12:05. It stops for ten minutes on the way. "
    "How long does it move?\nAnswer: From 9:40 to 12:05 are two hours and twenty-five minutes. Without the "
    "stop of ten minutes, the train moves for two hours and fifteen minutes.\n\nQuestion: How many seconds are "
    "there in a day?\nAnswer:",
    "The recipe is simple: slice two onions thinly, cook them in butter over low heat until they are brown and "
    "sweet, then add a spoon of flour and half a liter of stock. Let the soup simmer for twenty minutes. Toast "
    "the bread, put it into the bowls, cover it with grated cheese, and place the bowls under the grill until "
    "the cheese bubbles.",
)
"""English prose, mathematics, a program, science, a letter, numbers, questions, a recipe; 60 to 110 tokens each."""
