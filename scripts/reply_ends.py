"""Count how often a drafter drafts the end of replies.

    python scripts/reply_ends.py --target smollm2 --chats chats.jsonl --drafters drafter other --out ends.json

Each held-out conversation is given up to the last token before its end of text. The target writes that token, and the
end is the next one. A drafter that never learned where replies end costs one more forward pass for each reply.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from spectrain import load_method, load_target
from spectrain.data.chat_tokens import ChatRenderer, ChatTokens
from spectrain.data.texts import is_held_out, read_documents
from spectrain.decoding import generate

HELD_OUT_SHARE = 0.05  # as trainings have it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", required=True)
    parser.add_argument("--drafters", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target = load_target(args.target)
    documents = [one for one in read_documents(args.chats) if one.chat and is_held_out(one.id, HELD_OUT_SHARE)]
    found = ChatRenderer(target.tokenizer, target.eos_ids).tokens([one.chat for one in documents])
    prompts = [prompt for one in found if isinstance(one, ChatTokens) if (prompt := before_end(one, target.eos_ids))]
    rows = []
    for folder in args.drafters:
        method = load_method("spire", target, drafter=folder, max_nodes=4)
        texts = generate(target, method, prompts, max_new_tokens=3)
        written = [one for one in texts if one.tokens[1:2] and one.tokens[1] in target.eos_ids]
        rows.append([folder, str(len(prompts)), str(len(written)), str(sum(sum(one.accepted) > 0 for one in written))])
        print(*rows[-1], flush=True)
    columns = ["drafter", "replies", "that the target ends there", "whose end was drafted"]
    args.out.write_text(json.dumps({"columns": columns, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def before_end(found: ChatTokens, eos_ids: tuple[int, ...]) -> list[int]:
    """Return the tokens before the last one of the last reply."""
    ids = found.ids.tolist()
    return ids[: max((place for place, token in enumerate(ids) if token in eos_ids), default=1) - 1]


if __name__ == "__main__":
    main()
