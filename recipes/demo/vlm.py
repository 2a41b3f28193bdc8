"""The same for images and text: Qwen 3.5's micro model, killed, resumed on other numbers of ranks, batches compared.

    python -m recipes.demo.vlm

Everything lands in `demo-vlm/`, with `sequence.png`: packed sequences, and their images as the model gets them. The
exit code is 1 if any digest differs.
"""

import sys
from pathlib import Path

from recipes.demo.corpus import build
from recipes.demo.jobs import Jobs, check, console, show
from recipes.demo.pictures import MARKS, build_pairs
from recipes.demo.sequence import draw
from zephon import BatchSpec, Stream

JOBS = Jobs(Path("demo-vlm"), steps=40, save=20)
OURS = ("recipes.titan_image_text", "qwen_micro")
SEQ_LEN, GLOBAL_BATCH = 256, 8  # as in qwen_micro


def main() -> None:
    """Run the whole demonstration."""
    root = JOBS.fresh()
    with console.status("building texts, captioned pictures and a tokenizer from this machine's Python"):
        counts = build(root, megabytes=2.0, marks=MARKS)
        pictures = build_pairs(root / "pairs")
        recipe = (Path(__file__).parent / "vlm.toml").read_text()
        (root / "recipe.toml").write_text(recipe)
        (root / "glimmer.toml").write_text(recipe.replace("qwen3_5", "glimmer"))  # for glimmer_micro
        # The trainer names the tokenizer itself; the picture has no trainer.
        (root / "seen.toml").write_text(recipe + '[tokenizer]\npath = "tokenizer"\n')
    console.print(
        f"Corpus: {counts['docs']} documents of prose, 240 captioned crops of {pictures} pictures, mixed 0.5 / 0.5."
    )
    rows = JOBS.elastic(OURS)
    show({"Zephon": rows})
    file = root / "sequence.png"
    with Stream.open(root / "seen.toml", batch=BatchSpec(SEQ_LEN, GLOBAL_BATCH)) as stream:
        draw(stream, file)
    console.print(
        f"Packed sequences and their images: {file}. On the CPU attention is a dense mask, and the layers of linear "
        "attention, which need GPU kernels, are left out; the trainer is TorchTitan's own."
    )
    check(rows)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
