"""From conversations to captured hidden states: corpus, rows, capture, merge, verify.

    corpus   read the sources, check every conversation, count what is rejected      -> data/<split>.conversations.jsonl
    rows     the target's own answers (regenerate.enabled) or the corpus' ones       -> data/<split>.rows-<part>.jsonl
    capture  run the target over the rows and store its hidden states                -> shards/<split>/part-*.safetensors
    merge    make the one manifest when every part is complete
    verify   re-hash every shard, and hold the teacher states against the target's own greedy answers

<split> is train and validation. Every step leaves what is complete alone and goes on where a killed run was. With num_parts > 1 many
workers (part=0, part=1, ...) share the rows and capture steps.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.data import manifest, shards
from mtp_train.data.chat import Tally, check_template, open_tokenizer, prompt_ids, tokenize
from mtp_train.data.corpus import BadRow, read_corpus
from mtp_train.dist import dtype_name, pick_device, pick_dtype
from mtp_train.heads.table import resolve, taps_of
from mtp_train.interfaces import Conversation, Reject, Tap, TokenRow
from mtp_train.planner import report, state_bytes
from mtp_train.provenance import Claim, atomic_write, fingerprint, write_provenance
from mtp_train.target.ends import FrozenEnds, local_dir, num_positions
from mtp_train.target.identity import target_info
from precompute.demo import prepare
from precompute.engine_hf import EmbeddedEngine
from precompute.engine_vllm import VllmEngine
from precompute.plan import check_disk, remaining, split
from precompute.regenerate import Journal, Regenerator

log = logging.getLogger(__name__)
SPLITS = ("train", "validation")
AUDITED_ROWS = 64
AGREEMENT = 0.95  # of greedy answers; bfloat16 flips near-ties


class Precompute:
    """The steps, on one configuration."""

    def __init__(self, config: cfg.Config):
        self.config, self.options = config, config.precompute
        self.run_dir = Path(config.run_dir)
        self.parts = range(self.options.num_parts) if self.options.part is None else [self.options.part]

    # ------------------------------------------------------------ what everything depends on

    def open_target(self) -> None:
        """Identity and tokenizer of the target (its weights are loaded when first needed), and so the taps, which are written into the configuration."""
        self.info = target_info(self.config.target.path)
        self.tokenizer, self.stops = open_tokenizer(local_dir(self.config.target.path))
        depth = self.info.num_layers
        self.needed = taps_of(self.config.head, depth)
        layers = [tap.layer for tap in self.needed[:-1]] if self.options.tap_layers is None else sorted(self.options.tap_layers)
        self.options = replace(self.options, tap_layers=layers)
        self.config = replace(self.config, head=resolve(self.config.head, depth), precompute=self.options)
        self.taps = (*(Tap(layer, "pre") for layer in layers), Tap(depth, "post"))
        if (longest := self.config.data.max_length) > (limit := num_positions(self.config.target.path)):
            log.warning("data.max_length=%d is beyond the %d positions that the target was made for: its states mean little there", longest, limit)

    @cached_property
    def engine(self) -> EmbeddedEngine | VllmEngine:
        """What runs the target."""
        target, limit = self.config.target, self.config.data.max_length
        dtype = self.info.dtype if target.dtype == "auto" else dtype_name(pick_dtype(target.dtype, pick_device(target.device)))
        if self.config.engine.name == "vllm":
            ends = FrozenEnds.from_pretrained(target.path)
            return VllmEngine(str(local_dir(target.path)), self.taps, ends, dtype, limit, self.config.engine)
        return EmbeddedEngine(target.path, self.taps, dtype, target.device, limit)

    def sources(self, which: str) -> list[cfg.SourceConfig]:
        return getattr(self.config.data, which)

    def splits(self) -> list[str]:
        """The splits that have sources. Raises ValueError when there is nothing to train on."""
        if not self.sources("train"):
            raise ValueError("data.train is empty: give sources, e.g. 'data.train=[{path: my.jsonl, form: auto, domain: null, split: train, limit: null}]'")
        return [which for which in SPLITS if self.sources(which)]

    def corpus_fingerprint(self, which: str) -> str:
        """Changes with the content of the sources and with every setting that changes a row's ids."""
        meta = json.loads((self.run_dir / "data" / f"{which}.corpus.json").read_text())
        data = self.config.data
        settings = [meta["conversations"], self.info.tokenizer_hash, self.info.chat_template_hash, data.max_length, data.turns, data.template_kwargs]
        regenerate = asdict(self.options.regenerate)
        regenerate.pop("batch_size")  # an answer does not depend on its neighbours
        return fingerprint([*settings, self.info.weights_hash, regenerate] if regenerate.pop("enabled") else settings)

    # ------------------------------------------------------------ corpus

    def corpus(self, which: str) -> None:
        """Read and check the sources; the counts of rejects go beside the conversations."""
        tally, kept, seen = Tally(), [], Counter[str]()
        for source in self.sources(which):
            about = asdict(source)
            for item in read_corpus(about.pop("path"), **about, need_answer=not self.options.regenerate.enabled, seen=seen):
                if isinstance(item, Reject):
                    tally.reject(item)
                else:
                    tally.keep()
                    kept.append(json.dumps(asdict(item), ensure_ascii=False))
        self.report(f"{which} corpus", tally)
        text = "".join(line + "\n" for line in kept)
        atomic_write(self.run_dir / "data" / f"{which}.conversations.jsonl", text.encode("utf-8", "surrogatepass"))
        atomic_write(self.run_dir / "data" / f"{which}.corpus.json", json.dumps({"conversations": fingerprint(kept), **tally.summary()}, indent=2))

    def conversations(self, which: str) -> list[Conversation]:
        path = self.run_dir / "data" / f"{which}.conversations.jsonl"
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: run the corpus step first")
        lines = path.read_bytes().decode("utf-8", "surrogatepass").split("\n")
        return [Conversation(**{**(raw := json.loads(line)), "messages": tuple(raw["messages"])}) for line in lines if line]

    def report(self, what: str, tally: Tally) -> None:
        """Say what was rejected, and stop when nothing is left."""
        reasons = [*tally.rejects.items(), *((f"{reason} (used up to there)", count) for reason, count in tally.shortened.items())]
        log.info("%s: %d rows in, %d out%s", what, tally.rows_in, tally.rows_out, "".join(f", {count} x {reason}" for reason, count in reasons))
        for example in tally.summary()["examples"]:
            log.info("  %s", example)
        tally.check(what)

    # ------------------------------------------------------------ rows

    def rows_path(self, which: str, part: int) -> Path:
        return self.run_dir / "data" / f"{which}.rows-{part:05d}-of-{self.options.num_parts:05d}.jsonl"

    def rows(self, which: str, part: int) -> None:
        """Token rows of one part, regenerated or as the corpus has them."""
        path, mark = self.rows_path(which, part), self.corpus_fingerprint(which)
        if path.exists() and json.loads(path.open().readline())["fingerprint"] == mark:
            log.info("%s is complete", path.name)
            return
        conversations = self.conversations(which)
        share = split([1] * len(conversations), self.options.num_parts)[part]
        mine, tally = conversations[share.start : share.stop], Tally()
        with Claim(path.with_name(f".{path.stem}.lock")) as claim:
            produced = list(tally.rows(self.produce(mine, path.with_suffix(".journal"), mark, claim, tally)))
            if mine:
                self.report(f"{which} rows, part {part}", tally)
            lines = [{"fingerprint": mark, **tally.summary()}, *map(asdict, produced)]
            atomic_write(path, "".join(json.dumps(line) + "\n" for line in lines), claim.check)

    def produce(self, conversations: list[Conversation], journal: Path, mark: str, claim: Claim, tally: Tally) -> Iterator[TokenRow | Reject]:
        data, options = self.config.data, self.options.regenerate
        check_template(self.tokenizer, data.template_kwargs) if options.enabled or any(one.text is None for one in conversations) else None
        if not options.enabled:
            for one in conversations:
                yield tokenize(one, self.tokenizer, max_length=data.max_length, turns=data.turns, template_kwargs=data.template_kwargs)
            return
        regenerator = Regenerator(self.engine, self.tokenizer, self.stops, options, data.max_length, data.template_kwargs)
        yield from regenerator.rows(conversations, Journal(journal, mark, claim), tally)

    def read_rows(self, which: str, part: int) -> list[TokenRow]:
        path = self.rows_path(which, part)
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: run the rows step first")
        with path.open() as file:
            made_for = json.loads(file.readline())["fingerprint"]
            if made_for != self.corpus_fingerprint(which):
                raise ValueError(
                    f"{path} was made from another corpus or with other settings "
                    f"({made_for[:12]} there, {self.corpus_fingerprint(which)[:12]} here): run the rows step again"
                )
            return [TokenRow(**json.loads(line)) for line in file]

    # ------------------------------------------------------------ capture, merge, verify

    def shards_dir(self, which: str) -> Path:
        return self.run_dir / "shards" / which

    def capture(self, which: str, part: int) -> None:
        """States of one part's rows. What is stored already is left alone."""
        rows = self.read_rows(which, part)
        folder = self.shards_dir(which)
        index = folder / f"{manifest.part_name(part, self.options.num_parts)}.json"
        mark = self.corpus_fingerprint(which)
        if (
            index.exists()
            and (known := manifest.Manifest.read(index)).complete
            and known.header.corpus_fingerprint == mark
            and {row.id for row in rows} == shards.stored_ids(folder, part)
        ):
            self.check_captured(known, folder)
            log.info("%s of %s is complete", index.stem, which)
            return
        header = manifest.Header(self.info, self.taps, self.engine.info, mark, self.options.state_dtype)
        writer = shards.ShardWriter(folder, header, self.options.shard_tokens, part, self.options.num_parts)
        left = remaining(rows, writer.stored)
        needed = self.predict(which, len(left), sum(len(row.input_ids) for row in left))
        check_disk(folder, needed)
        for sample in self.engine.capture(left, self.options.batch_tokens):
            writer.add(sample)
        writer.finish()

    def check_captured(self, known: manifest.Manifest, folder: Path) -> None:
        """Raise ValueError where a complete capture has not the states that are asked for now; states of another engine are as good, and said."""
        known.target.check(self.info, str(folder))
        known.places(self.needed, str(folder))
        made, target = known.engine, self.config.target
        dtype = {"auto": self.info.dtype, "fast": made["dtype"]}.get(target.dtype, target.dtype)  # fast: the machine that captured chose
        pairs = {"precompute.state_dtype": (known.state_dtype, self.options.state_dtype), "target.dtype": (made["dtype"], dtype)}
        if different := [f"{name} is {there} there, {here} here" for name, (there, here) in pairs.items() if there != here]:
            raise ValueError(f"{folder} is complete, captured otherwise ({'; '.join(different)}): remove it to capture anew, or set what is there")
        if made["name"] != self.config.engine.name:
            log.warning("%s was captured by engine=%s, and is not captured anew by engine=%s", folder, made["name"], self.config.engine.name)

    def audit(self, which: str) -> None:
        """Teacher states through lm_head must give the target's own greedy answers again. Raises ValueError: a fault of capture, which training would not show.

        Nothing to hold against where answers are sampled or come from the corpus.
        """
        regenerate = self.options.regenerate
        if not regenerate.enabled or regenerate.temperature > 0:
            return
        reader, ends = shards.ShardReader(self.shards_dir(which)), FrozenEnds.from_pretrained(self.config.target.path, torch.float32)
        right = seen = 0
        for index in range(0, len(reader), max(1, len(reader) // AUDITED_ROWS)):
            sample = reader[index]
            marked = sample.loss_mask[1:]
            predicted = ends.logits(sample.hidden_states[:-1, -1][marked].float()).argmax(-1)
            right, seen = right + int((predicted == sample.input_ids[1:][marked]).sum()), seen + len(predicted)
        if right < AGREEMENT * seen:
            raise ValueError(
                f"{self.shards_dir(which)}: the stored teacher states predict {right} of {seen} tokens of the target's own greedy answers "
                f"(expected {AGREEMENT:.0%}): the capture took another layer, or the state before the final norm, or another target"
            )
        log.info("%s: the teacher states give %d of %d tokens of the target's own answers again", which, right, seen)

    def predict(self, which: str, num_rows: int, num_tokens: int) -> int:
        """Say how much will be written; returns bytes."""
        needed = state_bytes(num_tokens, len(self.taps), self.info.hidden_size, self.options.state_dtype)
        log.info(
            "%s: %d rows, %d tokens x %d taps x %d x %s = %.3f GiB to write",
            which,
            num_rows,
            num_tokens,
            len(self.taps),
            self.info.hidden_size,
            self.options.state_dtype,
            needed / 2**30,
        )
        return needed

    def dry_run(self) -> None:
        """What would be written, at most, if every answer used its whole budget."""
        for which in self.splits():
            self.corpus(which)
            conversations, data = self.conversations(which), self.config.data
            sizes = [min(data.max_length, self._longest(one)) for one in conversations]
            needed = self.predict(which, len(sizes), sum(sizes))
            for share in split(sizes, self.options.num_parts):
                log.info("  part %d of %d: rows %d to %d", share.part, share.num_parts, share.start, share.stop)
            check_disk(self.shards_dir(which), needed)

    def _longest(self, conversation: Conversation) -> int:
        regenerate = self.options.regenerate
        if not regenerate.enabled:
            row = tokenize(
                conversation,
                self.tokenizer,
                max_length=self.config.data.max_length,
                turns=self.config.data.turns,
                template_kwargs=self.config.data.template_kwargs,
            )
            return len(row.input_ids) if isinstance(row, TokenRow) else 0
        try:
            questions = [message for message in conversation.messages if message["role"] != "assistant"]
            asked = sum(message["role"] == "user" for message in questions)
            return sum(len(prompt_ids([one], self.tokenizer, self.config.data.template_kwargs)) for one in questions) + asked * regenerate.max_new_tokens
        except BadRow:
            return 0

    def run(self) -> None:
        """The configured steps, in order."""
        steps = self.options.steps
        if "demo" in steps:
            prepare(self.config.demo, self.run_dir / "data")
        splits = self.splits()
        self.open_target()
        if self.options.dry_run:
            self.dry_run()
            return
        for which in splits:
            if "corpus" in steps:
                self.corpus(which)
            for part in self.parts if "rows" in steps else ():
                self.rows(which, part)
        for which in splits:
            for part in self.parts if "capture" in steps else ():
                self.capture(which, part)
            if "merge" in steps and self.options.part is None:
                merged = shards.merge(self.shards_dir(which))
                log.info(
                    "%s: %d samples, %d tokens, %d supervised",
                    which,
                    *(sum(getattr(one, name) for one in merged.shards) for name in ("samples", "tokens", "supervised_tokens")),
                )
            if "verify" in steps and self.options.part is None:
                shards.verify(self.shards_dir(which))
                self.audit(which)
        if "engine" in vars(self):
            self.engine.close()
        write_provenance(self.run_dir / "shards", asdict(self.config))


def stage(config: cfg.Config) -> None:
    """The command mtp-precompute."""
    if config.plan:
        sys.stdout.write(report(config))
        return
    Precompute(config).run()


def main() -> None:
    """Console script mtp-precompute."""
    cli.main(__doc__, stage)


if __name__ == "__main__":
    main()
