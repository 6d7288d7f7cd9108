"""transformers' and peft's models on ep, on every rank: files, adapters, dtypes, generation."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from _support.ep.around import check
from _support.ep.on_ranks import whole
from _support.hf.all_double import AllDouble
from _support.hf.tiny import tiny_model
from parallel3d import Checks, MeshLayout, MixedPrecisionPolicy, build_mesh, checkpoint, parallelize


def on(layout: MeshLayout, model: nn.Module, **options: Any) -> nn.Module:
    plan = "auto" if layout.tp > 1 else None
    return parallelize(model, build_mesh(layout, device_type="cpu"), plan, **options)


def batch(rank: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(rank + 1))


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(input_ids=batch(rank), labels=batch(rank)).loss


def exported(folder: str, name: str, layout: MeshLayout) -> None:
    """``save_hf`` and ``hf_tensors`` from ep: what ``from_pretrained`` reads has the plain model's bits."""
    from safetensors.torch import load_file

    plain = tiny_model(name)
    parallel = on(layout, copy.deepcopy(plain))
    checkpoint.save_hf(folder, parallel)
    files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    want = {key: value for file in files for key, value in file.items()}
    got = {key: value.clone() for key, value in checkpoint.hf_tensors(parallel)}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    back = type(plain).from_pretrained(folder, dtype=torch.float64)
    for key, value in plain.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


def imported(folder: str, name: str, layout: MeshLayout, meta: bool) -> None:
    """``load_hf`` into a divided model with other values, or none."""
    plain = tiny_model(name)
    with torch.device("meta" if meta else "cpu"):
        model = type(plain)(copy.deepcopy(plain.config)).double()
    model = on(layout, model)
    checkpoint.load_hf(folder, model)
    for (key, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(q.detach()), p), key


def adapted(**lora: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    model = get_peft_model(tiny_model("qwen3_moe"), LoraConfig(r=3, lora_alpha=6, **lora))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn(param.shape) * 0.2)
    return model.double()


def lora(layout: MeshLayout, more: dict[str, Any], folder: str) -> None:
    """Gradients of adapters, and of what is trained beside them; and the adapters' file."""
    from peft import PeftModel, get_peft_model_state_dict

    plain = adapted(target_modules=["q_proj", "v_proj"], **more)
    parallel = on(layout, copy.deepcopy(plain))
    with AllDouble():
        for rank in range(layout.data_size):
            (loss(plain, rank) / layout.data_size).backward()
        loss(parallel, layout.data_rank(dist.get_rank())).backward()
    trained = [nn.Module(), nn.Module()]
    for model, kept in zip((plain, parallel), trained, strict=True):
        for name, param in model.named_parameters():
            if param.requires_grad:
                kept.register_parameter(name.replace(".", "_"), param)
    check(*trained)
    checkpoint.save_peft(folder, parallel)
    back = get_peft_model_state_dict(PeftModel.from_pretrained(tiny_model("qwen3_moe"), folder))
    want = get_peft_model_state_dict(plain)
    assert back.keys() == want.keys()
    assert all(torch.equal(back[key], want[key]) for key in want)


def adapters_of_experts(layout: MeshLayout) -> None:
    on(layout, adapted(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))


def note(dtypes: list[torch.dtype], _: nn.Module, args: Any) -> None:
    dtypes.extend(each.dtype for each in args)


def in_bf16(layout: MeshLayout, name: str) -> None:
    """Parameters in bfloat16: what the experts are given has the dtypes that it has without ep."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    runs = []
    for each in (layout, replace(layout, ep=1)):
        model = on(each, tiny_model(name).float(), mp_policy=policy, checks=Checks(audit=False))
        given: list[torch.dtype] = []
        for path, module in model.named_modules():
            if path.endswith("experts"):
                module.register_forward_pre_hook(partial(note, given))
        found = loss(model, each.data_rank(dist.get_rank()))
        found.backward()
        grads = {path: whole(p.grad) for path, p in model.named_parameters()}
        runs.append((found.detach(), given, grads))
    (loss_a, given_a, grads_a), (loss_b, given_b, grads_b) = runs
    assert given_a == given_b
    bound = 0.05  # some roundings of bfloat16, in another order
    torch.testing.assert_close(loss_a, loss_b, rtol=bound / 10, atol=0)
    for path, want in grads_b.items():
        assert (grads_a[path] - want).norm() <= bound * want.norm(), path


def generated(layout: MeshLayout) -> None:
    """Ranks with prompts of other lengths."""
    plain = tiny_model("qwen3_moe").float().eval()
    parallel = on(layout, copy.deepcopy(plain))
    mine = layout.data_rank(dist.get_rank())
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = batch(mine)[:, : 5 + mine]
    want, got = (model.generate(prompt, **options) for model in (plain, parallel))
    assert torch.equal(want, got)
