"""Trains the Llama of models/llama.h with PyTorch's own FSDP2 and DDP on two ranks over Gloo, and writes what it saw.

  python3 llama_witness.py OUT.pt [each-step]

OUT.pt (torch.save, so that torch::pickle_load reads it) is a dict of tensors:
  weight/NAME      the initial parameters, fp32
  tokens           int64 [steps, ranks, batch, length + 1]
  fsdp2/losses     fp64 [steps, ranks]: FSDP2, bf16 parameters and computation, fp32 reduction and master parameters
  ddp/losses       the same of DDP, all in fp32
  fsdp2/NAME, ddp/NAME    the parameters after the last step, fp32; with each-step those after every step, [steps, ...]
  adamw            fp64 [lr, beta1, beta2, eps, weight decay]
  shape            int64 [layers, width, heads, kv heads, hidden, vocab, context]
"""
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, BATCH = 2, 20, 2
LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, VOCAB, CONTEXT = SHAPE = (2, 32, 4, 2, 48, 48, 16)
HEAD = WIDTH // HEADS
EPS = 1e-5
THETA = 10000.0
LR, BETA1, BETA2, ADAM_EPS, DECAY = ADAMW = (3e-3, 0.9, 0.999, 1e-8, 0.1)


def rotary():
    """Cosine and signed sine, [length, 1, head], in fp32; angles in fp64."""
    half = torch.arange(HEAD // 2, dtype=torch.float64)
    angles = torch.arange(CONTEXT, dtype=torch.float64)[:, None] / THETA ** (2 * half / HEAD)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], 1).float()[:, None], torch.cat([-sine, sine], 1).float()[:, None]


def rotate(x, rows):
    cosine, signed_sine = rows
    # In fp32, as the tables are, also where x is bf16. One rounding of product and sum, as in models/rotary.cpp: with two,
    # a few elements of a bf16 result are rounded to the other side.
    return torch.addcmul(x * cosine, x.roll(HEAD // 2, -1), signed_sine).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, rows):
        def heads(y):
            return y.view(x.size(0), x.size(1), -1, HEAD)
        query = rotate(heads(self.q_proj(x)), rows).transpose(1, 2)
        key = rotate(heads(self.k_proj(x)), rows).transpose(1, 2)
        value = heads(self.v_proj(x)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()
        self.input_layernorm = nn.RMSNorm(WIDTH, EPS)
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, EPS)

    def forward(self, x, rows):
        y = x + self.self_attn(self.input_layernorm(x), rows)
        return y + self.mlp(self.post_attention_layernorm(y))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, EPS)
        self.rows = rotary()

    def forward(self, tokens):
        rows = [table[:tokens.size(1)] for table in self.rows]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rows)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Trunk()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        logits = self.lm_head(self.model(tokens[:, :-1])).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


def new_model():
    torch.manual_seed(1)
    model = Llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that all that is rounded matters from the first step.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model


def make_tokens():
    """Sequences that add a stride and, at times, one more."""
    generator = torch.Generator().manual_seed(2)
    many = (STEPS, RANKS, BATCH, 1)
    start = torch.randint(VOCAB, many, generator=generator)
    stride = torch.randint(1, 4, many, generator=generator)
    noise = torch.randint(2, (*many[:3], CONTEXT + 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1) + noise) % VOCAB


def whole(parameter):
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def train(model, parameters, rank):
    """Losses and, by name, the parameters after each step."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=(BETA1, BETA2), eps=ADAM_EPS, weight_decay=DECAY,
                                  fused=True)
    losses = torch.zeros(STEPS, RANKS, dtype=torch.float64)
    after = {name: [] for name in parameters}
    for step, tokens in enumerate(make_tokens()):
        loss = model(tokens[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step, rank] = loss.item()
        for name, parameter in parameters.items():
            after[name].append(whole(parameter))
    dist.all_reduce(losses)  # of the other ranks' columns each has zeros
    return losses, {name: torch.stack(values) for name, values in after.items()}


def with_fsdp2(rank):
    model = new_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    # Inputs are not cast: the rotary tables, which blocks are given, would become bf16. Activations are bf16 from the
    # embedding on.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return train(model, dict(model.named_parameters()), rank)


def with_ddp(rank):
    model = new_model()
    return train(DistributedDataParallel(model), dict(model.named_parameters()), rank)


def run(rank, folder, each_step):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    golden = {f"weight/{name}": parameter.detach().clone() for name, parameter in new_model().named_parameters()}
    golden["tokens"] = make_tokens()
    golden["adamw"] = torch.tensor(ADAMW, dtype=torch.float64)
    golden["shape"] = torch.tensor(SHAPE)
    for kind, witness in (("fsdp2", with_fsdp2), ("ddp", with_ddp)):
        golden[f"{kind}/losses"], parameters = witness(rank)
        for name, values in parameters.items():
            golden[f"{kind}/{name}"] = values if each_step else values[-1].clone()  # a view would keep them all
    if rank == 0:
        torch.save(golden, f"{folder}/golden.pt")
    dist.destroy_process_group()


def write(path, each_step):
    """What both witnesses see, into the file `path`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder, each_step), RANKS)
        with open(f"{folder}/golden.pt", "rb") as made, open(path, "wb") as kept:
            kept.write(made.read())


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["each-step"]):
        sys.exit(__doc__)
    write(sys.argv[1], each_step=len(sys.argv) == 3)
