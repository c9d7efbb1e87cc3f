"""Each model family beside transformers, tiny and random."""

from __future__ import annotations

from tests.contracts.family_contract import FamilyContract

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class TestQwen2(FamilyContract):
    family, baseline = "Qwen2", "llama"


class TestQwen3(FamilyContract):
    family, fields = "Qwen3", {"head_dim": 32}


class TestQwen3WithBiases(FamilyContract):
    family, fields = "Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}


class TestMistralWithAWindow(FamilyContract):
    """Shorter than a chunk, a prompt and what is generated, and no multiple of a block."""

    family, fields = "Mistral", {"sliding_window": 13}


class TestMistralWithoutAWindow(FamilyContract):
    family, fields, baseline = "Mistral", {"sliding_window": None, "head_dim": 32}, "llama"


class TestYarn(FamilyContract):
    family, fields, baseline = "Llama", {"rope_scaling": YARN}, "llama"


class TestMixtral(FamilyContract):
    family, fields = "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}


class TestMixtralWithAWindow(FamilyContract):
    family, fields = "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}


MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 16}


class TestQwen3Moe(FamilyContract):
    family, fields = "Qwen3Moe", {**MOE, "norm_topk_prob": True}


class TestQwen3MoeWithDenseLayers(FamilyContract):
    family, fields = (
        "Qwen3Moe",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    )


LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


class TestDeepseekV3(FamilyContract):
    family, baseline = "DeepseekV3", "latent"
    fields = {
        **LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    }  # fmt: skip


class TestDeepseekV3WithoutQueryCompression(FamilyContract):
    family, baseline = "DeepseekV3", "latent"
    fields = {
        **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rope_interleave": False,
        "norm_topk_prob": False,
    }  # fmt: skip


class TestDeepseekV2(FamilyContract):
    family, baseline = "DeepseekV2", "latent"
    fields = {
        **LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "n_shared_experts": 2, "norm_topk_prob": False,
    }  # fmt: skip


class TestDeepseekV2Lite(FamilyContract):
    family, baseline = "DeepseekV2", "latent"
    fields = {**LATENT, "q_lora_rank": 20, "topk_method": "greedy", "n_shared_experts": 2, "norm_topk_prob": False}
