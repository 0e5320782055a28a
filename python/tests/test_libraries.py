"""The backend `"precast"` and `maybe_compile` inside the libraries that people train and serve with.

The lines of code are those of the guide, "In the library that I use".
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import precast
import pytest
import torch
from conftest import folder
from precast.torch_private import registry
from torch import Tensor, nn
from torch._dynamo.utils import counters

CLASSES, WIDTH, WORDS = 3, 16, 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory, "libraries")


@pytest.fixture(autouse=True)
def backend(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the backend use the store, and count anew."""
    monkeypatch.setenv("PRECAST_STORE", str(store))
    torch._dynamo.reset()
    counters["precast"].clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def artifacts_answered() -> None:
    found = counters["precast"]
    assert found["artifact"] and not found["eager"], found


def bert(**settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
    return transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes, **settings)


def classifier(dropout: float = 0.1) -> Any:
    config = bert(num_labels=CLASSES, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return pytest.importorskip("transformers").BertForSequenceClassification(config)


def rows(count: int, width: int = 8) -> list[dict[str, Tensor]]:
    """Sentences of random words with labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (count, width), generator=generator)
    mask = torch.ones_like(ids)
    return [{"input_ids": ids[at], "attention_mask": mask[at], "labels": ids[at, 0] % CLASSES} for at in range(count)]


def trained(model: Any, folder: Path, **settings: Any) -> tuple[dict[str, Any], Any]:
    """Trains three steps by a `Trainer` with its defaults, evaluates and saves; returns the losses and the trainer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **sizes, **quiet, **settings)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(12), eval_dataset=rows(8))
    losses = {"train_loss": trainer.train().training_loss, **trainer.evaluate()}
    trainer.save_model(str(folder / "saved"))
    assert json.loads((folder / "saved" / "config.json").read_text())["model_type"] == "bert"
    return losses, trainer


def losses_agree(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("train_loss", "eval_loss"):
        assert given[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_compile_of_a_module() -> None:
    class Net(nn.Module):  # torch itself compiles no class of its own, as `Sequential`, in place
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.first(x)))

    eager = Net()
    net = copy.deepcopy(eager)
    net.compile(backend="precast")
    x = torch.randn(4, WIDTH)
    for one in (eager, net):
        one(x).square().sum().backward()
    torch.testing.assert_close(net.first.weight.grad, eager.first.weight.grad)
    artifacts_answered()


def test_trainer(tmp_path: Path) -> None:
    model = classifier()
    wanted, _ = trained(copy.deepcopy(model), tmp_path / "eager")
    given, trainer = trained(model, tmp_path / "own", torch_compile=True, torch_compile_backend="precast")
    losses_agree(given, wanted)
    assert trainer.model is model
    artifacts_answered()


@pytest.mark.parametrize("way", ["by the name of the backend", "wrapped"])
def test_accelerate(store: Path, way: str) -> None:
    accelerate = pytest.importorskip("accelerate")

    def step(net: nn.Module, **settings: Any) -> tuple[Tensor, list[Tensor]]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, **settings)
        prepared, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loss = prepared(torch.ones(4, WIDTH)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is net
        return loss.detach(), list(net.parameters())

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
    wanted = step(copy.deepcopy(net))
    if way == "wrapped":
        own = wrapped(copy.deepcopy(net), store, kind="autograd", prefer="artifact")
        of_the_same_class(own, net)
        torch.testing.assert_close(step(own), wanted)
        answered(own.precast_report(), 1)
    else:
        torch.testing.assert_close(step(net, dynamo_backend="precast"), wanted)
        artifacts_answered()


def test_a_process_that_has_imported_accelerate_before() -> None:
    names = pytest.importorskip("accelerate").utils.dataclasses.DynamoBackend
    del names._missing_
    with pytest.raises(ValueError, match="PRECAST"):
        names("PRECAST")
    registry.register()
    assert names("PRECAST").value == "PRECAST" and names("EAGER") is names.EAGER
    with pytest.raises(ValueError, match="OTHER"):
        names("OTHER")


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

        def training_step(self, batch: Any, _: int) -> Tensor:
            (x,) = batch
            return self.net(x).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(model: Any) -> None:
        data = torch.utils.data.TensorDataset(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)))
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **off)
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))

    model = Model()
    eager = copy.deepcopy(model)
    fit(eager)
    fit(torch.compile(model, backend="precast"))
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    artifacts_answered()


TINY = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DConditionModel(
        **TINY,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
    ).eval()


def noise() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "sample": torch.randn(1, 4, 8, 8, generator=generator),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(1, 5, 8, generator=generator),
    }


def test_diffusers() -> None:
    net = unet()
    with torch.no_grad():
        wanted = net(**noise()).sample
        net.compile_repeated_blocks(backend="precast")
        torch.testing.assert_close(net(**noise()).sample, wanted)
    artifacts_answered()


def sentences(folder: Path) -> Any:
    """A model of sentences with random weights, with a tokenizer of single letters."""
    library = pytest.importorskip("sentence_transformers")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertModel(bert()).save_pretrained(folder)
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return library.SentenceTransformer(str(folder), device="cpu")


TEXTS = ["a b c", "d e f", "g h i", "j k l"]


def test_sentence_transformers(tmp_path: Path) -> None:
    model = sentences(tmp_path)
    wanted = model.encode(TEXTS, convert_to_tensor=True)
    model[0].compile(backend="precast")
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), wanted)
    artifacts_answered()


def wrapped(module: nn.Module, store: Path, **settings: Any) -> Any:
    return precast.maybe_compile(module, precast.CompileConfig(store=store, **settings))


def answered(report: dict[str, Any], calls: int, reasons: dict[str, int] | None = None) -> None:
    """Programs answered these calls, and the original others for these reasons."""
    found = report["artifact"] + report.get("eager", 0)
    assert (found, report["reasons"]) == (calls, reasons or {}), report


def of_the_same_class(given: Any, module: Any) -> None:
    assert isinstance(given, type(module)) and type(given).__name__ == type(module).__name__
    assert inspect.signature(given.forward) == inspect.signature(module.forward)


@pytest.mark.parametrize(("kind", "calls", "reasons"), [("inference", 2, {"training": 3}), ("autograd", 5, {})])
def test_trainer_of_a_wrapped_model(
    store: Path, tmp_path: Path, kind: str, calls: int, reasons: dict[str, int]
) -> None:
    model = classifier()
    model.config.problem_type = "single_label_classification"  # else the first call writes it
    wanted, _ = trained(copy.deepcopy(model), tmp_path / "eager")
    given, _ = trained(own := wrapped(model, store, kind=kind), tmp_path / "own")
    losses_agree(given, wanted)
    of_the_same_class(own, model)
    answered(own.precast_report(), calls, reasons)
    assert (tmp_path / "own" / "checkpoint-3" / "config.json").exists()
    assert type(model).from_pretrained(tmp_path / "own" / "saved").num_labels == CLASSES


def test_sentence_transformers_of_a_wrapped_model(store: Path, tmp_path: Path) -> None:
    model = sentences(tmp_path)
    wanted = model.encode(TEXTS, convert_to_tensor=True)
    inner = model[0].auto_model
    model[0].model = wrapped(inner, store)
    of_the_same_class(model[0].auto_model, inner)
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), wanted)
    answered(model[0].auto_model.precast_report(), 1)
    model[0] = wrapped(model[0], store)  # its `forward` writes into its argument
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), wanted)
    assert model[0].precast_report()["reasons"] == {"not compiled": 1}
    model.save_pretrained(str(tmp_path / "saved"))
    again = type(model)(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), wanted)


def test_a_pipeline_of_diffusers_with_a_wrapped_model(store: Path, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    net = diffusers.UNet2DModel(**TINY, **blocks)
    pipe = diffusers.DDPMPipeline(net.eval(), diffusers.DDPMScheduler(num_train_timesteps=4))
    pipe.set_progress_bar_config(disable=True)

    def image(of: Any) -> Any:
        return of(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images

    wanted = image(pipe)
    pipe.unet = wrapped(pipe.unet, store)
    of_the_same_class(pipe.unet, net)
    assert abs(image(pipe) - wanted).max() < 1e-4
    answered(pipe.unet.precast_report(), 2)
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["unet"] == ["diffusers", "UNet2DModel"]
    again = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert abs(image(again) - wanted).max() < 1e-5


def test_generate_of_a_wrapped_causal_model(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes, **tokens)).eval()
    eager = copy.deepcopy(model)
    axes = {name: [1, "seq"] for name in ("input_ids", "attention_mask", "position_ids")}
    own = wrapped(model, store, buckets={"seq": [6, 7]}, shapes=axes, pad=False)
    ids = torch.arange(3, 9)[None]
    mask = torch.ones_like(ids)

    def texts(**settings: Any) -> list[list[int]]:
        settings = {"attention_mask": mask, "do_sample": False, **settings}
        return [one.generate(ids, **settings).tolist() for one in (own, eager)]

    with caplog.at_level("INFO", "precast"), torch.no_grad():
        assert own(ids).past_key_values is not None  # the default of a causal model
        assert own.precast_report()["reasons"] == {"cache": 1}
        given, wanted = texts(max_new_tokens=4)
        assert given == wanted
        assert own.precast_report()["reasons"] == {"cache": 5}
        (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
        assert "precast init" in warning.getMessage() and "sessions" in warning.getMessage()
        assert "Traceback" not in caplog.text
        given, wanted = texts(max_new_tokens=3, use_cache=False)
        assert given == wanted
        answered(own.precast_report(), 2, {"cache": 5, "shape": 1})
        given, wanted = texts(max_new_tokens=2)
        assert given == wanted
        answered(own.precast_report(), 2, {"cache": 7, "shape": 1})
