"""Fields that transformers' classes declare or read; `python -m tests.weights.config_fields` writes the table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from mugrpo_megatron.weights.config import CLASSES, FIELDS_OF_CLASSES
from mugrpo_megatron.weights.families import FAMILIES

READ = re.compile(r'config\.([a-z]\w*)\b(?!\()|getattr\((?:self\.)?config, "(\w+)"')


def declared_or_read(family: str) -> list[str]:
    """Fields of the config class and those that its module reads, but for the methods of a config."""
    config = CONFIG_MAPPING[family]
    module = Path(transformers.__file__).parent / "models" / model_type_to_module_name(family)
    source = "".join(path.read_text() for path in sorted(module.glob("modeling_*.py")))
    read = {first or second for first, second in READ.findall(source)}
    return sorted({field.name for field in dataclasses.fields(config)} | read)


def table() -> dict[str, list[str]]:
    return {family: declared_or_read(family) for family in sorted(FAMILIES) if family not in CLASSES}


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(family)}: {json.dumps(fields)}" for family, fields in table().items())
    FIELDS_OF_CLASSES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
