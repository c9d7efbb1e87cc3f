"""Planted faults: for every check a program it must catch. A check whose fault goes unseen is not a check.

Each fault is the baseline's own source with a few lines behind it: it runs on any model and is wrong in one way only.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.artifacts import Artifact, ArtifactStore

HEAD = "\n\nfrom dataclasses import replace\n\n\nclass Fault(Forward):\n"
TAIL = "\n\ndef build(model, settings):\n    return Fault(model, settings)\n"


@dataclass(frozen=True, slots=True)
class Fault:
    """`body` are methods of a subclass of the baseline's Forward. `dirty` ones spoil their host for the next."""

    name: str
    body: str
    dirty: bool = False
    before: str = ""  # module code ahead of the class
    cpp: str = ""

    def store(self, artifacts: ArtifactStore, baseline: Artifact, libraries: dict | None = None) -> Artifact:
        files = baseline.files()
        files["forward.py"] += self.before + HEAD + self.body + TAIL
        if self.cpp:
            files["unused.cpp"] = self.cpp
        settings = dict(baseline.manifest.settings)
        return artifacts.put(files, name=f"fault: {self.name}", libraries=libraries or {}, settings=settings)


LEAKY_PLAN = '''

class LeakyPlan(Plan):
    """Reads whole pages and masks the tail weakly, as if a small number were as good as minus infinity."""

    def __init__(self, batch, block_size, dtype):
        super().__init__(batch, block_size, dtype)
        rows = [s for s, phase in enumerate(batch.phase.tolist()) if phase == DECODE]
        if not rows:
            return
        context = batch.context_len[torch.tensor(rows)]
        longest = -(-int(context.max()) // block_size) * block_size
        position = torch.arange(longest).expand(len(rows), longest)
        held = position < context[:, None]
        inside = torch.minimum(position, (context[:, None] + block_size - 1) // block_size * block_size - 1)
        table = batch.block_table.long()
        self.decode_slots = table[torch.tensor(rows)[:, None], inside // block_size] * block_size + inside % block_size
        self.decode_mask = torch.zeros(held.shape, dtype=dtype).masked_fill_(~held, -8.0)[:, None, None]
'''
LEAKY_TAIL = Fault(
    "reads page tails",
    "    def plan(self, batch):\n        return LeakyPlan(batch, self.block_size, self.dtype)\n",
    before=LEAKY_PLAN,
)
MIXES = Fault(
    "mixes neighbours",
    """    def __call__(self, batch, kv):
        out = super().__call__(batch, kv)
        return out + 1e-3 * out.roll(1, 0) if len(out) > 1 else out
""",
)
CACHES_BY_BLOCK = Fault(
    "caches by block number",
    """    seen = {}

    def __call__(self, batch, kv):
        key = (batch.block_table.numpy().tobytes(), batch.positions.numpy().tobytes())
        if key not in self.seen:
            self.seen[key] = super().__call__(batch, kv)
        return self.seen[key]
""",
)
CACHES_BY_REQUEST = Fault(
    "caches by request number",
    """    seen = {}

    def __call__(self, batch, kv):
        key = (batch.request_id.numpy().tobytes(), batch.positions.numpy().tobytes())
        if key not in self.seen:
            self.seen[key] = super().__call__(batch, kv)
        return self.seen[key]
""",
)
COUNTS = Fault(
    "counts its calls",
    """    calls = 0

    def __call__(self, batch, kv):
        self.calls += 1
        return super().__call__(batch, kv) + 1e-3 * self.calls
""",
)
REMEMBERS = Fault(
    "remembers prompts",
    """    heard = None

    def __call__(self, batch, kv):
        out = super().__call__(batch, kv)
        if self.heard is not None:
            out[:, self.heard] += 0.01
        if len(batch.token_ids) > 2 * len(batch.context_len):
            self.heard = batch.token_ids.clone()
        return out
""",
)
SHARES_PREFIX = Fault(
    "shares blocks half written",
    """    def __call__(self, batch, kv):
        starts, table = batch.query_start[:-1].tolist(), batch.block_table.clone()
        first = {}
        for s, at in enumerate(starts):
            if int(batch.phase[s]) == DECODE or int(batch.positions[at]) > 0:
                continue
            owner = first.setdefault(tuple(batch.token_ids[at : at + 4].tolist()), s)
            table[s] = table[owner]
        return super().__call__(replace(batch, block_table=table), kv)
""",
)
EDGE = Fault(
    "wrong on a block's edge",
    """    def __call__(self, batch, kv):
        out = super().__call__(batch, kv)
        return out.flip(-1) if bool((batch.context_len % self.block_size == 0).any()) else out
""",
)
SPOILS_SHARED = Fault(
    "changes what all versions share",
    """    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.cos.mul_(0.99)
""",
    dirty=True,
)
COARSE = Fault(
    "computes in fewer bits than declared",
    """    def __init__(self, model, settings):
        super().__init__(model, settings)
        keep = ("norm", "embed")
        self.weights = {
            name: w if any(k in name for k in keep) else w.to(torch.float8_e5m2).to(w.dtype)
            for name, w in model.weights.items()
        }
""",
)
ONE_BIT = Fault(
    "one rounding more",
    "    def __call__(self, batch, kv):\n        return super().__call__(batch, kv) * (1 + 2e-7)\n",
)
CONSTANT = Fault(
    "constant output",
    """    def __call__(self, batch, kv):
        out = torch.zeros(len(batch.logit_rows), self.config.vocab_size)
        out[:, 7] = 1.0
        return out
""",
)
SPOILS_INPUTS = Fault(
    "changes its inputs",
    """    def __call__(self, batch, kv):
        out = super().__call__(batch, kv)
        batch.token_ids.add_(101).remainder_(self.config.vocab_size)
        return out
""",
)
SPINS = Fault(
    "spins in the background",
    """    def __init__(self, model, settings):
        super().__init__(model, settings)
        import threading

        def spin():
            while True:
                sum(range(1000))

        threading.Thread(target=spin, daemon=True).start()
""",
    dirty=True,
)
TAKES_THREADS = Fault(
    "changes the host's threads",
    """    def __call__(self, batch, kv):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return super().__call__(batch, kv)
""",
    dirty=True,
)
REPLAYS = Fault(
    "answers repeated steps from memory",
    """    seen = {}

    def __call__(self, batch, kv):
        key = (batch.token_ids.numpy().tobytes(), batch.positions.numpy().tobytes())
        if key not in self.seen:
            self.seen[key] = super().__call__(batch, kv)
        return self.seen[key]
""",
)
PEEKS = Fault(
    "lets a token see the ones after it in its step",
    """    def prefill_attention(self, q, k, v):
        if q.shape[0] in (1, k.shape[0]):
            return super().prefill_attention(q, k, v)
        k, v = (t.repeat_interleave(self.group, dim=1).transpose(0, 1)[None] for t in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v)[0].transpose(0, 1)
""",
)
TURNS_AWAY = Fault(
    "an expert turns rows away once it has its share",
    """    def mlp(self, i, x):
        out, e = super().mlp(i, x), self.config.experts
        if e is None or i not in e.layers:
            return out
        router = self.weights[f"model.layers.{i}.{e.block}.gate.weight"]
        first = F.linear(x.float(), router.float()).argmax(-1)
        before = (first[:, None] == first).tril(-1).sum(-1, keepdim=True)
        return out.masked_fill(before * e.count >= 2 * len(x), 0.0)
""",
)
IDLE_KERNEL = Fault("brings a kernel and does not call it", "    pass\n", cpp='extern "C" int unused() { return 1; }\n')

# check -> the fault it must catch
CONTROLS: dict[str, Fault] = {
    "poison": LEAKY_TAIL,
    "neighbours": MIXES,
    "block history": CACHES_BY_BLOCK,
    "request numbers": CACHES_BY_REQUEST,
    "repeats": COUNTS,
    "planted secret": REMEMBERS,
    "same prefix": SHARES_PREFIX,
    "boundary lengths": EDGE,
    "eviction and pre-emption": LEAKY_TAIL,
    "abort": MIXES,
    "shared prefix": SHARES_PREFIX,
    "seeded sampling": MIXES,
    "rejected drafts": PEEKS,
    "crowded experts": TURNS_AWAY,
    "distance from float32": COARSE,
    "perplexity": COARSE,
    "exactness": ONE_BIT,
    "constant output": CONSTANT,
    "inputs kept": SPOILS_INPUTS,
    "physical floor": REPLAYS,
    "proof of application": IDLE_KERNEL,
    "two versions": SPOILS_SHARED,
    "weights kept": SPOILS_SHARED,
    "baseline speed": SPINS,
    "idle": SPINS,
    "threads": TAKES_THREADS,
}
