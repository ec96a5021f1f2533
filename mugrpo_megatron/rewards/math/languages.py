"""Words of other languages than English around an answer: "the answer is", "at least", "or more".

MGSM (arXiv 2210.03057) has problems of GSM8K in ten languages, whose solutions end in the words for "the answer is".
"""

from __future__ import annotations

from mugrpo_megatron.rewards.math.characters import plain_characters

_WITH_SPACES = plain_characters(
    # Russian, Ukrainian, Greek, Arabic, Persian, Hebrew, Hindi, Bengali, Telugu
    r"ответ|відповідь|απάντηση|الجواب|الإجابة|پاسخ|תשובה|उत्तर|উত্তর|సమాధానం"
    # Spanish, Portuguese, French, German, Italian, Dutch, Polish, Czech, Turkish, Vietnamese, Swahili, Indonesian
    r"|respuesta|resposta|réponse|antwort|risposta|antwoord|odpowiedź|odpověď|cevap|yanıt|đáp án|đáp số|jibu"
    r"|jawaban(?:nya)?"
)
_IS = plain_characters(r"это|равен|равно|είναι|هو|هي|है|হল|হলো|es|é|è|est|ist|is|wynosi|to|je|là|ni|adalah")
_RIGHT = plain_characters("(?:correct[ae]?|correta|corretta|exacte?|finale?)")
_COLON = "[:：]"
ANSWER_IS = (
    rf"(?:正确答案|正確答案|答案|答え|正解)\s*(?:是|为|為|は|{_COLON})\s*{_COLON}?\s*|【(?:答案|答え)】\s*|^\s*答\s*{_COLON}\s*"
    rf"|(?:정답|답)\s*(?:은|는|{_COLON})\s*{_COLON}?\s*"
    rf"|{plain_characters('คำตอบ')}(?:สุดท้าย)?\s*(?:คือ|{_COLON})\s*{_COLON}?\s*"
    rf"|(?<!\w)(?:{_WITH_SPACES})(?:\s+{_RIGHT})?\s*(?:(?<=\s)(?:{_IS})(?!\w)\s*{_COLON}?|{_COLON}|—|–(?=\s))\s*"
    r"|సమాధానం\s+(?=[-0-9$\\])"
)
"""Regular expression of "the answer is" and "answer:"."""
COPULA_BEHIND = r"(?<=[A-Z0-9)}])\s*(?:입니다|이다|です|である|है)\s*[.。।]?\s*\Z"
"""Regular expression of the verb that ends "the answer is" in Korean, Japanese and Hindi."""
_BEFORE = plain_characters(
    # Spanish, Portuguese
    r"(?:al|por\s+lo|pelo)\s+menos|como\s+(?:mucho|máximo|mínimo)|a\s+lo\s+sumo|no\s+(?:máximo|mínimo)|alrededor\s+de"
    r"|(?:más|mais|menos|maior|mayor|menor|inferior|superior)\s+(?:do\s+)?(?:de|que|a)|aproximadamente|cerca\s+de|casi|quase"
    r"|entre|hasta|até|un[oa]s|quizás|tal\s+vez|talvez|(?:distinto|diferente)\s+(?:de|a)"
    # French, Italian
    r"|au\s+(?:moins|plus|maximum|minimum)|(?:plus|moins)\s+d[e'’]|(?:supérieure?|inférieure?|égale?\s+ou\s+\w+)\s+à"
    r"|environ|presque|jusqu['’]à|à\s+peu\s+près|peut-être|almeno|circa|quasi|(?:più|meno|maggiore|minore)\s+di|al\s+massimo"
    r"|fino\s+a|forse"
    # German, Dutch
    r"|mindestens|höchstens|etwa|ungefähr|rund|knapp|(?:mehr|weniger|größer|kleiner)\s+als|zwischen|bis\s+zu|vielleicht"
    r"|ongeveer|minstens|hoogstens|bijna|(?:meer|minder|groter|kleiner)\s+dan"
    # Russian
    r"|около|примерно|приблизительно|почти|больше|меньше|более|менее|от|до|возможно"
)
CHANGED_BEFORE = rf"(?<!\w)(?:{_BEFORE})[\s:]+(?:\w{{1,3}}\s+)?\$?\s*\Z"
"""Regular expression of words that make another value of the number behind them, such as "at least"."""
CHANGED_BEHIND = plain_characters(
    r"\s*\$?\s*(?:o|ou|oder|of|или)\s+(?:más|menos|mais|più|meno|plus|moins|mehr|weniger|meer|minder|больше|меньше|более|менее)"
    r"(?!\w)"
)
"""Regular expression of words that make another value of the number before them, such as "or more"."""
DENIED_BEFORE = plain_characters(
    r"(?<!\w)(?:(?:no|nunca)\s+(?:es|son|sea)|n['’](?:est|a)\s+(?:pas|jamais)|nicht|kein\w*|nie(?:mals)?|não\s+(?:é|são)"
    r"|non\s+(?:è|sono)|niet|geen|не|ni\s+pas|sauf|excepto|exceto|tranne|außer|behalve|кроме)\s+\$?\s*\Z"
    r"|(?:不是|并非|並非|不等于|不等於)\s*\$?\s*\Z"
)
"""Regular expression of words that deny the number behind them."""
