"""Failures that others have reported, in small: each is found at its line and explained."""

from __future__ import annotations

from .support import Checks, evaluated, found

# Pull request 1166 of TabPFN: attention looks for its kernel by an import inside of forward, which cut a compiled model
# into 43 graphs, unnoticed.
ATTENTION = """
def kernel():
    try:
        from fast_attention_that_is_not_installed import attention
    except ImportError:
        return F.scaled_dot_product_attention
    return attention

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(kernel()(q, k, v))

"""
FIXED = ATTENTION.replace("kernel()(q", "KERNEL(q").replace("class Layer", "KERNEL = kernel()\n\nclass Layer")
X = [("x", "float32", [2, 4, 8])]

EXPERTS = """\
import transformers
config = transformers.Qwen2MoeConfig(
    hidden_size=16, intermediate_size=16, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    vocab_size=32, max_position_embeddings=32,
)
self.model = transformers.Qwen2MoeModel._from_config(config, experts_implementation={how!r})"""


class Upstream(Checks):
    def test_an_import_in_forward_breaks_the_graph_of_torch_compile_and_one_outside_does_not(self) -> None:
        body, init = "return self.layers(x)", "self.layers = nn.Sequential(*(Layer() for _ in range(3)))"
        answer = self.check(self.open(evaluated(body, init, ATTENTION)), X, recompiles=True)
        # torch.export runs the import, and a build has one graph.
        self.assertTrue(answer["captured"])
        self.assertEqual(answer["artifacts"], 1)
        (one,) = found(answer, "graph-break")
        self.assertEqual(one["severity"], "medium")
        self.assertEqual(one["source"], "from fast_attention_that_is_not_installed import attention")
        self.assertIn("Import failure", one["why"])
        self.assertIn("outside of forward, once", one["fix"]["text"])
        first = answer["recompiles"]["calls"][0]
        self.assertGreater(first["graphs"], 1)
        self.assertGreater(first["breaks"], 0)
        answer = self.check(self.open(evaluated(body, init, FIXED)), X, recompiles=True)
        self.assertEqual(found(answer, "graph-break"), [])
        self.assertEqual([call["graphs"] for call in answer["recompiles"]["calls"]], [1, 0])

    def test_experts_of_transformers_have_another_implementation(self) -> None:
        ids, body = [("ids", "int64", [2, 4])], "return self.model(ids, use_cache=False).last_hidden_state"
        answer = self.check(self.open(evaluated(body, EXPERTS.format(how="grouped_mm"), inputs="ids")), ids)
        self.assertFalse(answer["captured"])
        (one,) = [one for one in answer["findings"] if one["severity"] == "high"]
        self.assertEqual(one["category"], "custom-operator")
        self.assertIn("`transformers::grouped_mm_fallback`, called by `model.layers.0.mlp.experts`", one["why"])
        self.assertIn('experts_implementation="batched_mm"', one["fix"]["text"])
        fixed = self.check(self.open(evaluated(body, EXPERTS.format(how="batched_mm"), inputs="ids")), ids)
        self.assertTrue(fixed["captured"])
        self.assertEqual([one for one in fixed["findings"] if one["severity"] != "low"], [])
