"""What is trained, and how thoroughly each section measures."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A Llama-like model and a batch; AdamW in fp32, one thread a rank. Each program has its own names for the same sizes."""

    name: str
    layers: int
    width: int
    heads: int
    hidden: int
    vocab: int
    context: int
    batch: int

    def tessera(self):
        names = ("layers", "width", "heads", "hidden", "vocab", "context", "batch")
        return [word for name in names for word in (f"--{name}", str(getattr(self, name)))]

    def peer(self):
        sizes = {"layers": self.layers, "d-model": self.width, "heads": self.heads, "d-ff": self.hidden,
                 "vocab": self.vocab, "seq": self.context, "batch": self.batch}
        return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]

    def tokens_per_step(self, ranks):
        return self.batch * self.context * ranks

    def parameters(self):
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + 2 * self.vocab * self.width + self.width

    def describe(self):
        return (f"{self.parameters() / 1e6:.1f} M parameters ({self.layers} layers, width {self.width}, {self.heads} heads, "
                f"hidden {self.hidden}, vocabulary {self.vocab}), {self.batch * self.context} tokens a rank and step")


WORK_A = Work("a", layers=6, width=384, heads=6, hidden=1024, vocab=4096, context=256, batch=4)
WORK_B = Work("b", layers=8, width=768, heads=12, hidden=2048, vocab=8192, context=64, batch=1)
SMOKE_WORK = Work("smoke", layers=2, width=64, heads=4, hidden=128, vocab=256, context=32, batch=1)

RANKS = 2
WARMUP = 2  # first steps of each run, which are not timed
PLACEMENTS = ("zero3", "zero2", "zero1", "ddp")
TORCH_PEERS = ("fsdp2", "fsdp1", "ddp", "zero1-torch", "single")
DEEPSPEED_PEERS = ("ds3", "ds2", "ds1")


@dataclass(frozen=True)
class Plan:
    """How much is run. `minutes` is what to expect of all sections together on two cores."""

    name: str
    minutes: str
    work_a: Work = WORK_A
    work_b: Work = WORK_B
    floor_repeats: int = 3
    floor_steps: int = 20
    rounds: int = 3
    peer_steps: int = 10
    memory_rounds: int = 2
    memory_steps: int = 4
    peers: tuple = TORCH_PEERS
    deepspeed: bool = True  # make its environment if it isn't there
    observer_repeats: int = 3
    observer_steps: int = 300
    kernel_repeats: int = 5
    stream_bytes: int = 128 << 20


FULL = Plan("full", "30 to 45")
QUICK = Plan("quick", "6 to 10", floor_repeats=1, rounds=1, peer_steps=6, memory_rounds=1, peers=("fsdp2", "ddp", "single"),
             deepspeed=False, observer_repeats=1, kernel_repeats=2)
SMOKE = Plan("smoke", "2", work_a=SMOKE_WORK, work_b=SMOKE_WORK, floor_repeats=1, floor_steps=2, rounds=1, peer_steps=2,
             memory_rounds=1, memory_steps=1, peers=("fsdp2", "ddp", "single"), deepspeed=False, observer_repeats=1,
             observer_steps=6, kernel_repeats=1, stream_bytes=4 << 20)
