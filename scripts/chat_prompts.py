"""Questions that the comparisons of engines ask."""

PROMPTS = (
    "Why is the sky blue?",
    "Give me a recipe for tomato soup.",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a virus and a bacterium?",
    "How do I politely decline an invitation?",
    "Name five uses for an empty jar.",
    "What causes the seasons?",
)
