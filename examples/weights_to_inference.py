"""Trains a Hugging Face model on two processes and streams its weights into a third, which generates text.

    torchrun --nproc-per-node 2 examples/weights_to_inference.py

It needs `pip install parallel3d[hf]`, and prints

    step 1: loss 5.5
    step 2: loss 5.2
    sent 21 tensors
    the engine generates [5, 6, 7, 8, ...]
    save_hf and from_pretrained: the same

The engine is a process of its own, not a rank of the training: a stand-in for vLLM, whose trainer engine
(``trainer_init(source=...)``, ``send_weights()``) takes the ``source`` below as it is: a ``WeightSource`` has
``metadata()`` and yields (name, whole tensor) each time it is iterated over, on every rank.
"""

import tempfile
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

import parallel3d as p3d

CONFIG: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
PROMPT = torch.tensor([[5, 6, 7]])


def generate(model: Any) -> list[int]:
    return model.eval().generate(PROMPT, max_new_tokens=8, do_sample=False)[0].tolist()


def engine(pipe: Any) -> None:
    """The inference process: a plain model, whose weights are replaced in each round."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    while (metadata := pipe.recv()) is not None:
        weights = model.state_dict()
        for name, dtype, shape in metadata:
            value = torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=dtype).view(shape)
            weights[name].copy_(value)
        pipe.send(generate(model))


def send_weights(source: Any, pipe: Any) -> None:
    """What a trainer engine does: every rank iterates over the source, the first one sends."""
    if pipe is not None:
        pipe.send([tuple(meta) for meta in source.metadata()])
    for _, tensor in source:  # with to=0 the loop of the other ranks has no turns
        pipe.send_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def main() -> None:
    mesh = p3d.build_mesh(p3d.MeshLayout(shard=-1), device_type="cpu")
    rank = dist.get_rank()
    pipe: Any = None
    worker: Any = None
    if rank == 0:
        pipe, theirs = mp.get_context("spawn").Pipe()
        worker = mp.get_context("spawn").Process(target=engine, args=(theirs,), daemon=True)
        worker.start()

    torch.manual_seed(0)  # the same weights on all ranks
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
    p3d.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = p3d.checkpoint.hf_tensors(
        model, to=0
    )  # once; dtype=torch.bfloat16 halves what is sent
    data = (torch.arange(8 * 17).view(8, 17) % 251).chunk(dist.get_world_size())[rank]
    for step in range(2):
        loss = model(input_ids=data, labels=data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.1f}", flush=True)
        send_weights(source, pipe)  # after each step, as in reinforcement learning
        if rank == 0:
            generated = pipe.recv()

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    p3d.checkpoint.save_hf(f"{folder[0]}/model", model)
    if rank == 0:
        pipe.send(None)
        worker.join()
        print(f"sent {len(source.metadata())} tensors")
        print(f"the engine generates {generated}")
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder[0]}/model")
        same = generate(loaded) == generated
        print(f"save_hf and from_pretrained: {'the same' if same else 'ANOTHER TEXT'}")
    dist.barrier()


if __name__ == "__main__":
    main()
