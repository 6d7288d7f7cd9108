"""Models whose shapes or calls were hard for sharding engines, from the libraries that have them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from _support.integrations.rows import STEPS, Result, Row, Run, difference, whole_weights
from parallel3d import MeshLayout, Parallel3dError, build_mesh, parallelize

Batch = tuple[tuple[Any, ...], dict[str, Any]]  # the model's args and kwargs


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]  # makes two rows of inputs
    loss: Callable[[Any], Tensor] = lambda out: out.loss


def _ids(generator: torch.Generator, length: int, vocab: int = 32) -> Tensor:
    return torch.randint(4, vocab, (2, length), generator=generator)


def _floats(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(2, *shape, generator=generator, dtype=torch.float64)


def _square(out: Any) -> Tensor:
    return out.sample.square().mean()


def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=32,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=8,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def batch(generator: torch.Generator) -> Batch:
        features = _floats(generator, 8, 16)
        return (), {"input_features": features, "labels": _ids(generator, 6)}

    return Case(lambda: WhisperForConditionalGeneration(config), batch)


def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = {**small, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 2}
    text |= {"bos_token_id": 1, "pad_token_id": 0}
    image = {**small, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=text, vision_config=image, projection_dim=8)

    def batch(generator: torch.Generator) -> Batch:
        ids, pixels = _ids(generator, 6), _floats(generator, 3, 8, 8)
        return (), {"input_ids": ids, "pixel_values": pixels, "return_loss": True}

    return Case(lambda: CLIPModel(config), batch)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )

    def batch(generator: torch.Generator) -> Batch:
        return (), {"input_ids": _ids(generator, 7), "labels": _ids(generator, 6)}

    return Case(lambda: T5ForConditionalGeneration(config), batch)


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        max_position_embeddings=16,
        experts_implementation="eager",
    )

    def batch(generator: torch.Generator) -> Batch:
        ids = _ids(generator, 8)
        return (), {"input_ids": ids, "labels": ids}

    return Case(lambda: MixtralForCausalLM(config), batch)


def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    def build() -> nn.Module:
        model = DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=2,
            out_channels=2,
            num_layers=2,
            sample_size=4,
            patch_size=2,
            num_embeds_ada_norm=10,
        )
        for module in model.modules():
            if hasattr(module, "dropout_prob"):  # of class labels, at random
                module.dropout_prob = 0.0
        return model

    def batch(generator: torch.Generator) -> Batch:
        times = torch.randint(0, 10, (2, 2), generator=generator)
        return (_floats(generator, 2, 4, 4),), {"timestep": times[0], "class_labels": times[1]}

    return Case(build, batch, _square)


def unet() -> Case:
    from diffusers import UNet2DConditionModel

    def build() -> nn.Module:
        return UNet2DConditionModel(
            sample_size=8,
            in_channels=2,
            out_channels=2,
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=8,
            attention_head_dim=4,
        )

    def batch(generator: torch.Generator) -> Batch:
        times = torch.randint(0, 10, (2,), generator=generator)
        return (_floats(generator, 2, 8, 8), times, _floats(generator, 3, 8)), {}

    return Case(build, batch, _square)


def vit() -> Case:
    from timm.models.vision_transformer import VisionTransformer

    def build() -> nn.Module:
        return VisionTransformer(
            img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5
        )

    return Case(build, lambda g: ((_floats(g, 3, 8, 8),), {}), lambda out: out.square().mean())


class Seq2Seq(nn.Module):
    """A bidirectional encoder of packed sequences, and a decoder that starts at its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 12)
        self.encoder = nn.LSTM(12, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(20, 10)
        self.decoder = nn.LSTM(12, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 32)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(source), lengths, batch_first=True, enforce_sorted=False
        )
        _, states = self.encoder(packed)
        start = [self.bridge(torch.cat([s[0::2], s[1::2]], -1)) for s in states]
        out, _ = self.decoder(self.embedding(target[:, :-1]), (start[0], start[1]))
        return F.cross_entropy(self.head(out).flatten(0, 1), target[:, 1:].flatten())


def lstm() -> Case:
    def batch(generator: torch.Generator) -> Batch:
        lengths = torch.tensor([4, 7])
        return (_ids(generator, 7), lengths, _ids(generator, 5)), {}

    return Case(Seq2Seq, batch, lambda loss: loss)


CASES = {case.__name__: case for case in (whisper, clip, t5, mixtral, dit, unet, vit, lstm)}


class _InFloat64(TorchFunctionMode):
    """Code that asks for float32 (norms, routers and softmax of some models) gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _built(case: Case) -> nn.Module:
    """The model in float64; what is initialized with zeros gets other values, which show more."""
    torch.manual_seed(0)
    model = case.build().double()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim and not param.any():
                param.normal_(std=0.1)
    return model.train()


def _batch(case: Case, step: int, data_rank: int) -> Batch:
    return case.batch(torch.Generator().manual_seed(100 * step + data_rank))


def _train(case: Case, model: nn.Module, data_ranks: Iterable[int]) -> Run:
    """Steps on the mean loss of these data ranks' batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = [0.0] * STEPS
    ranks = list(data_ranks)
    with _InFloat64():
        for step in range(STEPS):
            for data_rank in ranks:
                args, kwargs = _batch(case, step, data_rank)
                loss = case.loss(model(*args, **kwargs)) / len(ranks)
                loss.backward()
                losses[step] += loss.item()
            optimizer.step()
            optimizer.zero_grad()
    return Run(losses, whole_weights(model))


def _train_on_all(case: Case, model: nn.Module, layout: MeshLayout) -> Run:
    """Each rank steps on its own batch. Losses are means over all data ranks."""
    run = _train(case, model, [layout.data_rank(dist.get_rank())])
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return Run((losses / layout.world_size).tolist(), run.weights)


def _train_alone(case: Case, data_size: int) -> Run:
    """Rank 0 trains the plain model on all batches and gives the others the result."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        plain = _built(case)
        before = {n: p.detach().clone() for n, p in plain.named_parameters()}
        found[0] = run = _train(case, plain, range(data_size))
        still = [n for n, p in run.weights.items() if torch.equal(p, before[n])]
        assert len(still) < len(before) / 4, still  # it has trained
    dist.broadcast_object_list(found)
    return found[0]


def train(
    name: str, mesh: tuple[int, int, int], tp_plan: Any = None, with_example: bool = False
) -> Result:
    """Trains the model on ours, on torch's FSDP2 and tensor parallelism by the same plan where they can, and
    in one process alone."""
    case, layout = CASES[name](), MeshLayout(*mesh)
    device_mesh = build_mesh(layout, device_type="cpu")
    want = _train_alone(case, layout.data_size)
    example = _batch(case, 0, 0) if with_example else None
    model = parallelize(_built(case), device_mesh, tp_plan, example=example)
    ours = difference(_train_on_all(case, model, layout), want)
    try:
        peer = parallelize(_built(case), device_mesh, tp_plan, example=example, engine="torch")
    except Parallel3dError as error:
        assert 'engine="torch"' in str(error), error  # a scalar, experts
        return Result(ours, None)
    return Result(ours, difference(_train_on_all(case, peer, layout), want))


def _row(
    name: str,
    package: str,
    mesh: tuple[int, int, int],
    tp_plan: str | None = None,
    *,
    lines: int = 1,
    note: str = "",
) -> Row:
    with_example = lines > 1
    kind = 'tp_plan="auto"' if tp_plan else "data parallel"
    return Row(
        f"{package}: {name}, {kind}",
        (package,),
        lines,
        mesh,
        'torch by `engine="torch"`',
        train,
        (name.lower(), mesh, tp_plan, with_example),
        note=note,
    )


FLAT, HYBRID, TP, TP_OF_TWO = (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)
_EXAMPLE = "with `example=`: no input can be guessed"
_FP32 = "what its code computes in float32 is computed in float64"

ROWS = [
    _row("Whisper", "transformers", FLAT),
    _row("Whisper", "transformers", TP, "auto", lines=2, note=_EXAMPLE),
    _row("CLIP", "transformers", FLAT, note="FSDP2 takes no scalars, such as `logit_scale`"),
    _row("CLIP", "transformers", TP, "auto", lines=2, note=_EXAMPLE),
    _row("T5", "transformers", HYBRID),
    _row(
        "T5", "transformers", TP, "auto", note="attention is left whole: its positions are by head"
    ),
    _row("Mixtral", "transformers", HYBRID, note=_FP32),
    _row("Mixtral", "transformers", TP, "auto", note=_FP32),
    _row("Mixtral", "transformers", TP_OF_TWO, "auto", note=_FP32),
    _row("DiT", "diffusers", FLAT, note="one unit lies inside another"),
    _row("DiT", "diffusers", TP, "auto", lines=2, note=_EXAMPLE),
    _row("UNet", "diffusers", HYBRID),
    _row("UNet", "diffusers", TP, "auto", lines=2, note=f"{_EXAMPLE}; convolutions are left whole"),
    _row("ViT", "timm", FLAT),
    _row("ViT", "timm", TP, "auto"),
    _row("LSTM", "torch", FLAT, note="sequence to sequence, packed, bidirectional"),
    _row("LSTM", "torch", TP, "auto", lines=2, note=f"{_EXAMPLE}; LSTMs are left whole"),
]
