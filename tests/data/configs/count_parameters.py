"""Writes what transformers makes of the config.json files beside it: `counted.json`.

    python -m venv /tmp/hf && /tmp/hf/bin/pip install transformers torch
    /tmp/hf/bin/python tests/data/configs/count_parameters.py

For every file: the number of parameters of the model with a head for language modelling, built on the meta device
(tied ones count once; of a model of text and images the text model), and the keys as this version of transformers saves
them. Tests compare both with what twofold reads; transformers itself is no dependency of the project.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

FOLDER = Path(__file__).parent
ELSEWHERE = {
    "t5": transformers.AutoModelForSeq2SeqLM,
    "bert": transformers.AutoModelForMaskedLM,
    "vit": transformers.AutoModelForImageClassification,
}


def counted(file: Path) -> dict[str, object]:
    keys = json.loads(file.read_text())
    config = transformers.AutoConfig.for_model(**keys)
    saved = json.loads(config.to_json_string(use_diff=True))
    text = config.get_text_config() if "text_config" in keys else config
    kind = ELSEWHERE.get(keys["model_type"], transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        model = kind.from_config(text)
    return {"parameters": sum(each.numel() for each in model.parameters()), "saved": saved}


def main() -> None:
    files = sorted(each for each in FOLDER.glob("*.json") if each.name != "counted.json")
    models = {}
    for file in files:
        models[file.stem] = counted(file)
        print(f"{file.stem:24} {models[file.stem]['parameters']:>16,}", file=sys.stderr)
    made = {"transformers": transformers.__version__, "torch": torch.__version__, "models": models}
    (FOLDER / "counted.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
