"""Programs as a language model would write them: edits of the baseline, and a kernel in C++."""

from __future__ import annotations

from optimizer.agents.programs.edit import parts
from tests.optimizer.agents.llm_server import answer


def hunks(*pairs: tuple[str, str]) -> str:
    return "\n".join(f"<<<<\n{old}\n====\n{new}\n>>>>" for old, new in pairs)


FUSED = answer(
    {"name": "fused qkv", "hypothesis": "Q, K and V read one input: one matrix makes three calls one."},
    edit_forward=hunks(*((h.old, h.new) for h in parts()["fused_qkv"].hunks)),
)

# every logit belongs to its neighbour
WRONG = answer(
    {"name": "rolled logits", "focus": "attention"},
    edit_forward=hunks(
        ("        return F.linear(x, self.head).float()", "        return F.linear(x, self.head).float().roll(1, -1)")
    ),
)

SILU = """#include <cmath>
#include <cstdint>

extern "C" void silu_times(const float *gate, const float *up, float *out, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (count > 65536)
    for (int64_t i = 0; i < count; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}
"""

# the gate of the MLP in one pass over its input, for float32
KERNEL = answer(
    {"name": "silu kernel", "hypothesis": "Activation and product in one pass.", "expected": 1.02},
    edit_forward=hunks(
        (
            "import torch\nimport torch.nn.functional as F",
            "import ctypes\n\nimport torch\nimport torch.nn.functional as F",
        ),
        (
            "        self.group = c.num_attention_heads // c.num_key_value_heads",
            "        self.group = c.num_attention_heads // c.num_key_value_heads\n"
            '        self.silu, self.threads = settings.library("silu").silu_times, settings.threads',
        ),
        (
            '        return self.linear(F.silu(self.linear(x, f"{p}.gate_proj")) * self.linear(x, f"{p}.up_proj"), f"{p}.down_proj")',
            '        gate, up = self.linear(x, f"{p}.gate_proj"), self.linear(x, f"{p}.up_proj")\n'
            "        out = torch.empty_like(gate)\n"
            "        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (gate, up, out))\n"
            "        self.silu(*pointers, ctypes.c_int64(gate.numel()), ctypes.c_int64(self.threads))\n"
            '        return self.linear(out, f"{p}.down_proj")',
        ),
    ),
    silu=SILU,
)
