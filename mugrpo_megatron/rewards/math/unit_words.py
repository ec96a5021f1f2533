r"""Rewrites units in other scripts, and signs of units, as Latin words: `5厘米`, `5 см` and `5 ㎝` as `5\text{ cm}`."""

from __future__ import annotations

import re

_WORDS = {
    "mm": "毫米 公厘 ミリメートル 밀리미터 мм миллиметр",
    "cm": "厘米 公分 センチメートル センチ 센티미터 см сантиметр",
    "dm": "分米 дм",
    "m": "米 公尺 メートル 미터 м метр",
    "km": "千米 公里 キロメートル 킬로미터 км километр",
    "mi": "英里 マイル 마일 миля",
    "ft": "英尺 フィート 피트 фут",
    "in": "英寸 インチ 인치 дюйм",
    "mg": "毫克 ミリグラム 밀리그램 мг миллиграмм",
    "g": "克 公克 グラム 그램 г грамм",
    "kg": "千克 公斤 キログラム キロ 킬로그램 кг килограмм",
    "jin": "斤 市斤",
    "tonne": "吨 噸 公噸 トン 톤 т тонна",
    "ml": "毫升 ミリリットル 밀리리터 мл миллилитр",
    "l": "升 公升 リットル 리터 л литр",
    "s": "秒 秒钟 秒鐘 초 с сек секунда",
    "min": "分钟 分鐘 мин минута",
    "h": "小时 小時 时间 時間 시간 ч час",
    "day": "天 日 日間 일 день дня дней",
    "week": "周 星期 週 週間 주 неделя",
    "month": "个月 個月 か月 ヶ月 개월 месяц",
    "year": "年 年間 년 год года лет",
    "yuan": "元 人民币 人民幣 块 塊",
    "yen": "円 日元",
    "won": "원",
    "ruble": "рубль руб р",
    "dollar": "美元 美金 ドル 달러 доллар",
    "euro": "欧元 歐元 ユーロ 유로 евро",
    "celsius": "摄氏度 攝氏度",
    "fahrenheit": "华氏度 華氏度",
    "ohm": "欧姆 歐姆 欧 オーム 옴 Ом ом",
    "newton": "牛顿 牛頓 牛 ニュートン 뉴턴 Н ньютон",
    "joule": "焦耳 焦 ジュール 줄 Дж джоуль",
    "watt": "瓦特 瓦 ワット 와트 Вт ватт",
    "volt": "伏特 伏 ボルト 볼트 В вольт",
    "pascal": "帕斯卡 帕 パスカル Па",
    "hz": "赫兹 赫茲 赫 ヘルツ 헤르츠 Гц",
    "kelvin": "开尔文 開爾文 开 ケルビン 켈빈",
    "kilowatt": "千瓦 キロワット 킬로와트 кВт",
    "megawatt": "兆瓦 МВт",
    "kilojoule": "千焦 千焦耳 キロジュール кДж",
    "kilopascal": "千帕 кПа",
    "megapascal": "兆帕 МПа",
    "hectopascal": "百帕 ヘクトパスカル",
    "kilovolt": "千伏 кВ",
    "millivolt": "毫伏 мВ",
    "kilonewton": "千牛 кН",
    "kilohertz": "千赫 千赫兹 кГц",
    "megahertz": "兆赫 兆赫兹 МГц",
    "kiloohm": "千欧 千歐 кОм",
    "megaohm": "兆欧 兆歐 МОм",
    "kilocalorie": "千卡 大卡 ккал",
    "ampere": "安培 安 アンペア 암페어 А ампер",
    "milliampere": "毫安 мА",
    "coulomb": "库仑 庫侖 库 クーロン Кл",
    "farad": "法拉 Ф",
    "tesla": "特斯拉 Тл",
    "henry": "亨利 Гн",
    "mole": "摩尔 摩爾 摩 モル 몰 моль",
    "millisecond": "毫秒 ミリ秒 мс",
    "microsecond": "微秒 мкс",
    "nanosecond": "纳秒 нс",
    "micrometer": "微米 мкм",
    "nanometer": "纳米 奈米 нм",
    "microgram": "微克 мкг",
    "hectare": "公顷 公頃 ヘクタール га",
    "radian": "弧度 ラジアン рад",
    "electronvolt": "电子伏特 电子伏 эВ",
    "atmosphere": "个大气压 大气压 標準大気圧 атм",
}  # fmt: skip
_LATIN = {word: unit for unit, words in _WORDS.items() for word in words.split()}
_ANY = "|".join(sorted(map(re.escape, _LATIN), key=len, reverse=True))
_AREAS = {"平方": "square", "立方": "cubic", "кв": "square", "куб": "cubic", "제곱": "square", "세제곱": "cubic"}
_ENDING = "(?:[аеиоуыя]|ов|ев|ей)?"
_FACTORS = {
    "十万": "10^{5}", "十萬": "10^{5}", "百万": "10^{6}", "百萬": "10^{6}", "백만": "10^{6}", "千万": "10^{7}",
    "千萬": "10^{7}", "천만": "10^{7}", "十亿": "10^{9}", "十億": "10^{9}", "百亿": "10^{10}", "百億": "10^{10}",
    "千亿": "10^{11}", "千億": "10^{11}", "万亿": "10^{12}",
    "百": "10^{2}", "千": "10^{3}", "万": "10^{4}", "萬": "10^{4}", "만": "10^{4}", "亿": "10^{8}", "億": "10^{8}",
    "억": "10^{8}",
}  # fmt: skip
_LETTERS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0400-\u04ff"
"""Letters of Chinese, Japanese, Korean and Russian. `normalize` takes none of
their words for "more", "or" and magnitudes as a unit (`NOT_IN_A_UNIT`)."""
_BEHIND = r"(?<=[0-9)}])\s*"
_END = r"\s*(?=\Z|,)"
_TEXT = r"\\(?:text[a-z]*|math(?:rm|sf|bf)|mbox|hbox|operatorname)\s*\{\s*"
_IN_TEXT = re.compile(rf"{_BEHIND}{_TEXT}(?P<words>[{_LETTERS}][{_LETTERS}\s/]*)\}}")
_POWER = r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
_UNIT = re.compile(
    rf"{_BEHIND}(?P<area>{'|'.join(_AREAS)})?[. ]*(?P<unit>{_ANY}){_ENDING}(?P<power>{_POWER})"
    rf"(?:\s*(?:/|每|毎)\s*(?P<second_area>{'|'.join(_AREAS)})?(?P<second>{_ANY}|[时時]){_ENDING}(?P<other_power>{_POWER}))?\.?{_END}"
)
_SCALE = re.compile(rf"(?<=[0-9])\s*(?P<factor>{'|'.join(_FACTORS)})(?=[{_LETTERS}]{{0,3}}{_END})")
COUNTED = re.compile(rf"{_BEHIND}(?P<word>[{_LETTERS}]{{1,4}}|[\u0400-\u04ff]+){_END}")
"""Matches a counter, or a unit that `_WORDS` lacks. In Chinese, Japanese and Korean it has at most four letters, since
a sentence has more."""
_DEGREES = re.compile(rf"{_BEHIND}[度도]{_END}")
_PERCENT = re.compile(r"百分之\s*([0-9]+(?:\.[0-9]+)?)")
_PARTS = re.compile(
    rf"{_BEHIND}(?:{_TEXT})?(?:(?P<thousand>‰|\\permil(?:le)?(?![A-Za-z])|\\textperthousand|per\s?mil(?:le?)?\b)"
    rf"|‱|\\textpertenthousand|basis\s+points?)\s*\}}?{_END}"
)

_PREFIXES = {"k": "kilo", "K": "kilo", "M": "mega", "G": "giga", "m": "milli", "n": "nano", "": ""}
_MICRO = re.compile(
    rf"{_BEHIND}(?:{_TEXT})?(?:[µμ]|\\mu(?![A-Za-z]))\s*\}}?\s*(?:{_TEXT})?(?P<unit>mol|[msgLlAFCVWTHJN])\s*\}}*"
    r"(?=\s*(?:\Z|[,/^]))"
)
_MICROS = {
    "m": "meter", "s": "second", "g": "gram", "L": "liter", "l": "liter", "A": "ampere", "F": "farad", "C": "coulomb",
    "V": "volt", "W": "watt", "T": "tesla", "H": "henry", "J": "joule", "N": "newton", "mol": "mole",
}  # fmt: skip
_OMEGA = r"(?:Ω|\\Omega(?![A-Za-z]))"
_OHMS = (
    re.compile(rf"{_BEHIND}{_TEXT}(?P<prefix>[kKMGmn]?)\s*(?:\}}\s*)?{_OMEGA}\s*\}}?(?=\s*(?:\Z|[,/]))"),
    re.compile(rf"{_BEHIND}(?P<prefix>[kKMG])\s*(?:{_TEXT})?{_OMEGA}\s*\}}?(?=\s*(?:\Z|[,/]))"),
    re.compile(rf"(?<=[0-9)}}])(?:\s*(?P<prefix>)Ω|\s+{_OMEGA})(?=\s*(?:\Z|[,/]))"),
)
_ANGSTROM = re.compile(
    rf"{_BEHIND}(?:{_TEXT})?(?:Å|\\AA(?![A-Za-z])|\\mathring\s*\{{\s*(?:\\mathrm\s*\{{\s*)?A\s*\}}+)\s*\}}?(?=\s*(?:\Z|[,/^]))"
)
_KELVIN = re.compile(r"(?<=[0-9)}])\s+K(?=\s*(?:\Z|,))")


def without_parts(text: str) -> str:
    r"""Rewrite `5‰` and `5\text{ per mille}` as `5 \times 10^{-3}`, and `5‱` and `5\text{ basis points}` as
    `5 \times 10^{-4}`."""
    return _PARTS.sub(lambda found: f" \\times 10^{{{-3 if found['thousand'] else -4}}}", text)


_EACH = re.compile(rf"^\s*每(?P<per>{_ANY})\s*(?P<speed>[0-9].*)\Z")
"""Matches a speed as Chinese says it: `每小时60公里`."""
_TOTAL = re.compile(r"^\s*(?:所以|因此|故)?\s*(?:一共|总共|總共|共计|共計|共)有?\s*(?=[0-9])")
_DOTTED = re.compile(r"(?<=[0-9)}])\s*(?P<power>sq|cu)(?:\.\s*|\s+)(?=[A-Za-z])")


def with_latin_units(text: str) -> str:
    r"""Rewrite units after numbers as `\text{ cm}` and the like, also the signs of ohm, ångström, kelvin and micro.

    `5万` becomes `5 \times 10^{4}`, `60度` `60^\circ`, and `百分之5` `5\%`. A `\Omega` directly after a number is a
    variable.
    """
    if "Omega" in text or "Ω" in text:
        for pattern in _OHMS:
            text = pattern.sub(lambda match: f"\\text{{ {_PREFIXES[match['prefix'] or '']}ohm}}", text)
    if "AA" in text or "Å" in text or "mathring" in text:
        text = _ANGSTROM.sub(r"\\text{ angstrom}", text)
    if "K" in text:
        text = _KELVIN.sub(r"\\text{ kelvin}", text)
    if "mu" in text or "µ" in text or "μ" in text:
        text = _MICRO.sub(lambda match: f"\\text{{ micro{_MICROS[match['unit']]}}}", text)
    if "sq" in text or "cu" in text:
        text = _DOTTED.sub(lambda match: f" {'square' if match['power'] == 'sq' else 'cubic'} ", text)
    if text.isascii():
        return text
    text = _EACH.sub(r"\g<speed>/\g<per>", _TOTAL.sub("", text))
    text = _IN_TEXT.sub(r" \g<words>", _PERCENT.sub(r"\1\\%", text))
    text = _UNIT.sub(_latin, _DEGREES.sub(r"^\\circ ", text))
    return _UNIT.sub(_latin, _SCALE.sub(lambda match: f" \\times {_FACTORS[match['factor']]} ", text))


def _latin(match: re.Match[str]) -> str:
    area = f"{_AREAS[match['area']]} " if match["area"] else ""
    other_area = f"{_AREAS[match['second_area']]} " if match["second_area"] else ""
    first = f"\\text{{ {area}{_LATIN[match['unit']]}}}{match['power'].strip()}"
    return (
        f"{first}/\\text{{{other_area}{_LATIN.get(match['second'], 'h')}}}{match['other_power'].strip()}"
        if match["second"]
        else first
    )
