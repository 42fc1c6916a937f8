"""Words that tasks are made of: short, common, and mostly one token each."""

import numpy as np

NOUNS = (
    "lighthouse", "harvest", "violin", "glacier", "lantern", "orchard", "compass", "meadow", "castle", "market",
    "bridge", "garden", "island", "museum", "station", "tunnel", "windmill", "library", "harbour", "temple", "apple",
    "river", "stone", "cloud", "table", "horse", "paper", "music", "winter", "doctor", "engine", "forest", "guitar",
    "hammer", "insect", "jacket", "kettle", "letter", "mirror", "orange", "pencil", "rabbit", "ticket", "uncle",
    "velvet", "window", "button", "candle", "dragon", "eagle", "feather", "ginger", "jungle", "kitchen", "lemon",
    "marble", "ocean", "planet", "queen", "ribbon", "shadow", "thunder", "umbrella", "village", "whistle", "anchor",
    "basket", "copper", "desert", "elbow", "flame", "grape", "honey", "ivory", "jewel", "knight", "ladder", "monkey",
    "olive", "pepper", "rocket", "saddle", "tiger", "valley", "wagon", "zebra", "bottle", "carpet", "donkey",
    "finger", "hotel", "igloo", "juice", "lawyer", "melon", "napkin", "onion", "pillow", "school", "tower",
    "bread", "chair", "dance", "farmer", "ghost", "helmet", "iron", "lake", "mountain", "nurse", "oven", "piano",
    "rain", "ship", "teacher", "valve", "wheel", "yard", "beach", "camera", "door", "field", "glass", "house",
)  # fmt: skip
ADJECTIVES = (
    "quiet", "golden", "silver", "early", "hollow", "gentle", "bright", "narrow", "ancient", "frozen", "hidden",
    "lonely", "modern", "rapid", "smooth", "wooden", "bitter", "clever", "distant", "eager", "famous", "giant",
    "happy", "idle", "jolly", "kind", "lively", "mighty", "noble", "plain", "royal", "simple", "tender", "useful",
    "warm", "young", "broken", "crimson", "dusty", "empty", "fresh", "green", "heavy", "little", "muddy", "purple",
    "round", "sharp", "tall", "wild",
)  # fmt: skip


def distinct_nouns(rng: np.random.Generator, count: int) -> list[str]:
    """So many different nouns in random order."""
    return [str(word) for word in rng.choice(NOUNS, count, replace=False)]


def vocabulary(rng: np.random.Generator) -> list[str]:
    """All nouns, then all pairs of an adjective and a noun ("quiet-river"), each in random order."""
    nouns = distinct_nouns(rng, len(NOUNS))
    pairs = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in nouns]
    return [*nouns, *(str(pair) for pair in rng.permutation(pairs))]


def distinct_numbers(rng: np.random.Generator, count: int) -> list[str]:
    """So many different numbers of five digits."""
    return [str(value) for value in 10_000 + rng.choice(90_000, count, replace=False)]
