"""Removes what surrounds an answer: tokens that end a turn, and the marks of Markdown and HTML."""

from __future__ import annotations

import re

_JOINT = "[_▁ -]?"
_NAME = (
    rf"im{_JOINT}end|im{_JOINT}start|fim{_JOINT}pad|e[o][sdtm](?:{_JOINT}(?:id|token))?"
    rf"|end(?:{_JOINT}of)?(?:{_JOINT}(?:text|sentence|turn(?:{_JOINT}token)?|message|utterance|response|document|role|header{_JOINT}id))?"
    rf"|(?:role|turn|message){_JOINT}(?:end|stop)|return|call|stop|pad(?:ding)?(?:_[0-9]+)?"
    rf"|start(?:{_JOINT}header{_JOINT}id|{_JOINT}of{_JOINT}(?:role|turn(?:{_JOINT}token)?))?"
    r"|user|system|observation|human|assistant|bot|tool_response"
)
_END = re.compile(
    rf"<[|｜](?:{_NAME})[|｜]>|<turn\|>|<\|turn>|</?s>|<\\s>|<(?:eos|pad|unk|eot|eod|(?:end|start)_of_turn)>"
    r"|<end>|\[(?:EOS|END|PAD|SEP|/?INST|end[ _]of[ _]text)\]|(?:<[|｜][^<>|｜\s]{1,40}[|｜]>\s*)+\Z"
    # EXAONE, MiniMax, Seed-OSS, InternLM, Baichuan, Nemotron
    r"|\[\|(?:endofturn|user|system|assistant|tool)\|\]|\[e~\[|<\[EOS_never_used\]>|<seed:eos>|<eo[adhms]>"
    r"|<(?:reserved_|extra_id_|SPECIAL_|special_)[0-9]{1,4}>",
    re.IGNORECASE,
)
_ASSISTANT = re.compile(
    r"(?:<[|｜](?:im_start|start|start_header_id|start_of_role|role_start)[|｜]>\s*assistant\b(?:<[|｜][a-z_]+[|｜]>)?"
    r"|<[|｜](?:assistant|Assistant|CHATBOT_TOKEN|bot)[|｜]>|\[\|assistant\|\]|<start_of_turn>\s*model\b|<\|turn>\s*model\b|\[/INST\])"
    r"[ \t]*\n?"
)


def answering_turn(text: str) -> str:
    """The text of the assistant's last turn that is not empty, without the tokens that begin and end the turn.

    Responses of this project have no such tokens, but those in files of other programs may. Text after the token that
    ends the turn belongs to another turn and is left out.
    """
    if "<" not in text and "[" not in text:
        return text
    begin = max((turn.end() for turn in _ASSISTANT.finditer(text) if text[turn.end() :].strip()), default=0)
    rest = text[begin:]
    while (leading := _END.match(rest.lstrip())) and rest.strip():
        rest = rest.lstrip()[leading.end() :]
    end = next((token for token in _END.finditer(rest) if "box" not in token[0]), None)
    return rest[: end.start()] if end else rest


_SPANS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\w)}\]*\\])\*{1,3}(?=[^\s*])(?P<inside>[^*\n]*[^\s*])\*{1,3}(?![\w(*])",
        r"(?<![\w)}\]$\\])_{1,3}(?=[^\s_])(?P<inside>(?:[^_\n]|(?<=\w)_(?=\w))*?[^\s_])_{1,3}(?![\w({])",
        r"(?<!`)`{1,2}(?=[^`\s])(?P<inside>[^`\n]*?)`{1,2}(?!`)",
        r"(?<![\w=])==(?=[^\s=])(?P<inside>[^=\n]*[^\s=])==(?![\w=])",
        r"<(?P<tag>b|strong|i|em|u|mark|code|p|div|center|span|big)(?:\s[^<>]*)?>(?P<inside>[^<\n]*)</(?P=tag)>",
    )
)
"""Matches emphasis. Its marks do not touch a word or a formula from outside, so `2*3*4` and `x_1` have none."""
_STRUCK = re.compile(r"~~(?=\S)[^~\n]*~~|<(?P<tag>s|del|strike)>[^<\n]*</(?P=tag)>")
_FENCE = re.compile(r"^[ \t]*(?:```+|~~~+)[ \t]*[A-Za-z]*[ \t]*$\n?", re.MULTILINE)
_LINE_MARK = re.compile(r"^[ \t]*(?:#{1,6}(?!#)[ \t]+|>[ \t]+(?=[^0-9\s])|[*+][ \t]+)", re.MULTILINE)
_SUPERSCRIPT = re.compile(r"<(?P<tag>su[pb])>(?P<inside>[^<>\n]{1,20})</(?P=tag)>")
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_DEEPEST = 3
"""Number of levels of emphasis inside emphasis that are removed."""


def without_markup(text: str) -> str:
    """Text without emphasis, code marks, headings and bullets. Struck-out text is left out; `<sup>` becomes an
    exponent."""
    if not any(mark in text for mark in "*_`~=<#"):
        return text
    text = _LINE_BREAK.sub("\n", _STRUCK.sub("", _FENCE.sub("", text)))
    text = _SUPERSCRIPT.sub(lambda match: f"{'^' if match['tag'] == 'sup' else '_'}{{{match['inside']}}}", text)
    for _ in range(_DEEPEST):
        before = text
        for span in _SPANS:
            text = span.sub(r"\g<inside>", text)
        if text == before:
            break
    return _LINE_MARK.sub("", text).strip()
