"""AdLoCo once more, in NumPy, as the papers and docs/method.md describe it: what the package must
compute. Nothing of the package's code is used.

It has trainers, workers, inner SGD and AdamW, rates that follow tokens and batches, an outer step
whose fragments may be in flight, what lossy syncs send and keep, batches by the norm test or a
ramp, switch mode, and merges. It trains y = c tanh(B tanh(A x)), whose gradient is written out.
Wire formats are given, each as its block and what it makes of a block's values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Plans = dict[int, dict[int, list[int]]]
"""The samples of each micro-batch of an inner step, by trainer and worker."""
Read = Callable[[int, int, int], tuple[Array, Array]]
"""(stream, position, count) -> inputs [count, 3] and targets [count]."""

Wire = tuple[int, Callable[[NDArray[np.float32]], NDArray[np.float32]]]
"""Values of a block, and what remains of rows of blocks that are encoded and decoded."""

LAYERS = (slice(0, 9), slice(9, 18), slice(18, 21))
"""Where A, B and c are in all parameters."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run. The names are those of the package's settings."""

    num_trainers: int
    workers_per_trainer: int
    dropped: tuple[int, ...]
    sync_every: int
    sync_growth: float
    max_grad_norm: float
    inner: str
    """sgd or adamw."""
    lr: float
    shape: str
    total_samples: int
    """Of the schedule of the rate."""
    warmup: float
    final: float
    coupling: str
    outer: tuple[float, float, bool] | None
    """Rate, momentum, Nesterov; None: the mean."""
    equal_weights: bool
    fragments: int
    tau: int
    alpha: float
    wire: str
    """fp32, or the name of a wire format."""
    feedback: bool
    """Keep in the workers' parameters what a sync leaves unsent."""
    feedback_decay: float
    rule: str
    """constant, ramp, unbiased or plug-in."""
    eta: float
    ramp: tuple[int, int, int]
    initial: int
    minimum: int
    maximum: int
    max_growth: float
    hysteresis: float
    grow_only: bool
    groups: int
    test_steps: int
    last_steps: bool
    max_micro_batch: int
    multiplier: float
    mode: str
    policy: str
    merge_count: int
    merge_every: int
    first_merge: int
    parameters: str
    outer_momentum: str
    inner_state: str
    streams: str
    requested_batch: str


@dataclass
class Worker:
    id: int
    params: Array
    stream: int
    position: int = 0
    steps: float = 0.0
    first: Array = field(default_factory=lambda: np.zeros(21))
    """Momentum."""
    second: Array = field(default_factory=lambda: np.zeros(21))
    """AdamW's mean of squares."""

    def forget(self) -> None:
        self.steps, self.first, self.second = 0.0, np.zeros(21), np.zeros(21)


@dataclass
class Known:
    """What is known of S or |G|^2: a normal distribution of its logarithm."""

    test_variance: float
    mean: float | None = None
    variance: float = 0.0


@dataclass
class Trainer:
    id: int
    global_params: Array
    workers: list[int]
    requested_batch: int
    momentum: Array = field(default_factory=lambda: np.zeros(21))
    stepped: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(21, dtype=bool))
    """Parameters that have had an outer step since the momentum began."""
    samples: int = 0
    tested_at: int = 0
    """Samples of the trainer at its last tests."""
    grad_variance: Known = field(default_factory=lambda: Known(0.5))
    """S, the trace of the covariance of samples' gradients."""
    grad_norm_sq: Known = field(default_factory=lambda: Known(0.02))
    """|G|^2."""


def gradient(params: Array, inputs: Array, targets: Array) -> Array:
    """Of the mean squared error."""
    a, b, c = params[:9].reshape(3, 3), params[9:18].reshape(3, 3), params[18:]
    first = np.tanh(inputs @ a.T)
    second = np.tanh(first @ b.T)
    error = 2 * (second @ c - targets) / len(targets)
    inside = np.outer(error, c) * (1 - second**2)
    before = (inside @ b) * (1 - first**2)
    return np.concatenate([(before.T @ inputs).ravel(), (inside.T @ first).ravel(), error @ second])


def coded(tensor: NDArray[np.float32], wire: Wire) -> NDArray[np.float32]:
    """What remains of a tensor that is sent. Its last block is filled with its values, again and
    again.
    """
    block, remains = wire
    begun = len(tensor) // block * block
    rows = [*tensor[:begun].reshape(-1, block)]
    if begun < len(tensor):
        rows.append(np.resize(tensor[begun:], block))
    return remains(np.array(rows, dtype=np.float32)).ravel()[: len(tensor)]


def exchanged(
    each: Sequence[Array], weights: Sequence[float], wire: Wire | None, decay: float = 0.0
) -> tuple[Array, list[Array]]:
    """The weighted sum of the workers' vectors as all receive it, and what each one keeps of what
    was not sent. Each layer is a tensor of its own, whose blocks the workers own in turn.

    each: Of whole models; what is not exchanged now is 0.
    """
    if wire is None or len(each) == 1:
        return np.asarray(weights) @ np.array(each), [np.zeros(21) for _ in each]
    total, kept = np.zeros(21), [np.zeros(21, dtype=np.float32) for _ in each]
    for layer in LAYERS:
        added = np.zeros(layer.stop - layer.start, dtype=np.float32)
        for own, vector, weight in zip(kept, each, weights, strict=True):
            values = vector[layer].astype(np.float32)
            sent = coded(values * np.float32(weight), wire)
            own[layer] = (values - sent / np.float32(weight)) * np.float32(decay)
            added += sent
        if len(each) > 2:  # Else the two send each other their blocks.
            again = coded(added, wire)
            owner = np.arange(len(added)) // wire[0] % len(each)
            for worker, weight in enumerate(weights):
                part = np.float32(decay / max(weight, 1 / len(each)))
                kept[worker][layer] += np.where(owner == worker, (added - again) * part, 0)
            added = again
        total[layer] = added
    return total, [own.astype(np.float64) for own in kept]


def even(total: int, parts: int) -> list[int]:
    """Whole numbers that differ by one at most, the larger first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def in_proportion(total: int, batches: Sequence[int], fewest: int) -> list[int]:
    """Whole numbers by largest remainders: each has the fewest, and the rest is shared as what a
    batch's part of the total exceeds these by.
    """
    above = [max(0.0, total * each / sum(batches) - fewest) for each in batches]
    rest = total - fewest * len(batches)
    exact = [rest * each / sum(above) if sum(above) else rest / len(batches) for each in above]
    shares = [fewest + math.floor(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda index: math.floor(exact[index]) - exact[index])
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


class Oracle:
    """The state of a run, which `round` changes."""

    def __init__(
        self, settings: Settings, start: Array, read: Read, wires: Sequence[Wire | None]
    ) -> None:
        """wires: What is lost of pseudo-gradients; of outer momentum in a merge; and of parameters
        in a merge. None: nothing.
        """
        self.told, self.read = settings, read
        self.sync_wire, self.momentum_wire, self.parameter_wire = wires
        self.samples = self.rounds = 0
        self.round_samples: dict[int, int] = {}
        """Of each worker in the newest round."""
        per_trainer = settings.workers_per_trainer
        living = [
            worker
            for worker in range(settings.num_trainers * per_trainer)
            if worker not in settings.dropped
        ]
        self.workers = {worker: Worker(worker, start.copy(), worker) for worker in living}
        homes: dict[int, list[int]] = {}
        for worker in living:
            homes.setdefault(worker // per_trainer, []).append(worker)
        first, least = settings.initial, settings.minimum
        if settings.rule == "ramp":
            first = max(least, min(settings.ramp[0], settings.maximum))
        self.trainers = {
            trainer: Trainer(trainer, start.copy(), workers, first)
            for trainer, workers in homes.items()
        }

    # The rate and the length of a round.

    def decay(self, samples: int) -> float:
        told = self.told
        warmup = told.warmup * told.total_samples
        if told.shape == "constant" or samples < warmup:
            return 1.0
        if told.shape == "cosine":
            done = min(1.0, (samples - warmup) / (told.total_samples - warmup))
            return told.final + (1 - told.final) * (1 + math.cos(math.pi * done)) / 2
        falls = min(0.2, 1 - told.warmup) * told.total_samples
        left = min(1.0, max(0.0, (told.total_samples - samples) / falls))
        return told.final + (1 - told.final) * left

    def rate(self, samples: int, batch: int) -> float:
        warmup = self.told.warmup * self.told.total_samples
        part = samples / warmup if samples < warmup else self.decay(samples)
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.told.coupling]
        return float(self.told.lr * part * (batch / 8) ** power)

    # Batches.

    @property
    def _tests(self) -> bool:
        return self.told.rule in ("unbiased", "plug-in")

    @property
    def fewest(self) -> int:
        """Samples of a worker in a step."""
        return 2 if self._tests else 1

    def _micro_batches(self, trainer: Trainer) -> dict[int, list[int]]:
        """Those of a trainer's inner step (switch mode)."""
        told, count = self.told, len(trainer.workers)
        fits = count * told.max_micro_batch
        accumulates = told.mode == "always" or (
            told.mode == "switch" and trainer.requested_batch > told.multiplier * fits
        )
        total = trainer.requested_batch if accumulates else min(trainer.requested_batch, fits)
        shares = even(max(total, self.fewest * count), count)
        return {
            worker: even(share, math.ceil(share / told.max_micro_batch))
            for worker, share in zip(trainer.workers, shares, strict=True)
        }

    def _plans(self, steps: int, final_samples: int) -> list[Plans]:
        plans = {id: self._micro_batches(each) for id, each in self.trainers.items()}
        if not final_samples:
            return [plans] * steps
        each = [(id, worker) for id, plan in plans.items() for worker in plan]
        shares = in_proportion(
            final_samples, [sum(plans[id][worker]) for id, worker in each], self.fewest
        )
        last: Plans = {id: {} for id in plans}
        for (id, worker), share in zip(each, shares, strict=True):
            last[id][worker] = even(share, math.ceil(share / max(plans[id][worker])))
        return [*[plans] * (steps - 1), last]

    # Algorithm 1.

    def round(self, final_samples: int = 0) -> None:
        """final_samples: Of the last inner step over all trainers; 0: as many as of the others."""
        told = self.told
        shrunk = self.decay(self.samples) ** told.sync_growth
        steps = round(told.sync_every / shrunk)
        plans = self._plans(steps, final_samples)
        self.round_samples = {
            worker: sum(sum(each[id][worker]) for each in plans)
            for id, plan in plans[0].items()
            for worker in plan
        }
        tests: dict[int, list[tuple[float, ...]]] = {id: [] for id in self.trainers}
        tested = range(steps)[-told.test_steps :] if told.last_steps else range(told.test_steps)
        arriving: dict[int, dict[int, tuple[Array, list[Array]]]] = {}
        for step, plan in enumerate(plans):
            batches = {id: sum(map(sum, each.values())) for id, each in plan.items()}
            self.samples += sum(batches.values())
            for id in self.trainers:
                rate = self.rate(self.samples, batches[id])
                for worker, micro in plan[id].items():
                    found = self._inner_step(self.workers[worker], micro, rate, step in tested)
                    tests[id] += [found] if found else []
            for fragment in range(told.fragments):
                arrival = (fragment + 1) * steps // told.fragments
                leaves = max(arrival - told.tau, fragment * steps // told.fragments)
                if step + 1 == leaves:
                    arriving[fragment] = {
                        id: self._outer_step(each, fragment) for id, each in self.trainers.items()
                    }
                if step + 1 == arrival:
                    self._receive(fragment, arriving[fragment])
        self.rounds += 1
        for trainer in self.trainers.values():
            trainer.samples += sum(self.round_samples[worker] for worker in trainer.workers)
            self._request(trainer, tests[trainer.id])
        self._merge()

    def _inner_step(
        self, worker: Worker, micro: list[int], rate: float, tests: bool
    ) -> tuple[float, ...] | None:
        """Take a step. If it is a test step, return S, |G|^2 and |gbar|^2 as it measures them, its
        samples, and its groups less one.
        """
        told, samples = self.told, sum(micro)
        inputs, targets = self.read(worker.stream, worker.position, samples)
        worker.position += samples
        mean = gradient(worker.params, inputs, targets)
        found = None
        if tests and self._tests:
            wanted = told.groups * math.ceil(len(micro) / told.groups)
            sizes = even(samples, min(wanted, samples))
            ends = np.cumsum(sizes)[:-1]
            parts = zip(np.split(inputs, ends), np.split(targets, ends), strict=True)
            squares = [float(np.sum(gradient(worker.params, *part) ** 2)) for part in parts]
            square = float(mean @ mean)
            scatter = float(np.dot(sizes, squares)) - samples * square
            trace = max(0.0, scatter) / (len(sizes) - 1)
            found = trace, square - trace / samples, square, samples, len(sizes) - 1
        norm = math.sqrt(mean @ mean)
        if 0 < told.max_grad_norm < norm:
            mean = mean * (told.max_grad_norm / norm)
        worker.steps += 1
        if told.inner == "sgd":
            worker.first = 0.9 * worker.first + mean
            worker.params = worker.params - rate * worker.first
        else:
            worker.first = 0.9 * worker.first + 0.1 * mean
            worker.second = 0.999 * worker.second + 0.001 * mean**2
            first = worker.first / (1 - 0.9**worker.steps)
            second = worker.second / (1 - 0.999**worker.steps)
            kept = worker.params * (1 - rate * 0.01)
            worker.params = kept - rate * first / (np.sqrt(second) + 1e-8)
        return found

    def _part(self, fragment: int) -> NDArray[np.int64]:
        layers = LAYERS[fragment :: self.told.fragments]
        return np.concatenate([np.arange(each.start, each.stop) for each in layers])

    def _weights(self, trainer: Trainer) -> list[float]:
        """Of the workers in a sync."""
        equal, samples = self.told.equal_weights, self.round_samples
        counts = [1 if equal else samples[worker] for worker in trainer.workers]
        return [count / sum(counts) for count in counts]

    def _outer_step(self, trainer: Trainer, fragment: int) -> tuple[Array, list[Array]]:
        """Update a fragment of the global parameters. Returns what the workers get later, and what
        each one keeps.
        """
        part, start = self._part(fragment), trainer.global_params
        differences = np.zeros((len(trainer.workers), 21))
        for row, worker in zip(differences, trainer.workers, strict=True):
            row[part] = (start - self.workers[worker].params)[part]
        decay = self.told.feedback_decay if self.told.feedback else 0.0
        pseudo_gradient, kept = exchanged(
            [*differences], self._weights(trainer), self.sync_wire, decay
        )
        rate, momentum, nesterov = self.told.outer or (1.0, 0.0, False)
        old = np.where(trainer.stepped, momentum * trainer.momentum, 0.0)
        velocity = old + pseudo_gradient
        trainer.momentum[part] = velocity[part]
        trainer.stepped[part] = True
        step = rate * (pseudo_gradient + momentum * velocity if nesterov else velocity)
        trainer.global_params[part] = (start - step)[part]
        return trainer.global_params[part].copy(), [own[part] for own in kept]

    def _receive(self, fragment: int, arrived: dict[int, tuple[Array, list[Array]]]) -> None:
        part, alpha = self._part(fragment), self.told.alpha
        for trainer in self.trainers.values():
            new, kept = arrived[trainer.id]
            for worker, own in zip(trainer.workers, kept, strict=True):
                params = self.workers[worker].params
                params[part] = alpha * params[part] + (1 - alpha) * (new - own)

    # The next batch.

    def _request(self, trainer: Trainer, tests: Sequence[Any]) -> None:
        told = self.told
        if told.rule == "constant" or (self._tests and not tests):
            return
        if told.rule == "ramp":
            first, last, over = told.ramp
            wanted = round(first * (last / first) ** min(1.0, trainer.samples / over))
        else:
            wanted = max(1, math.ceil(min(self._norm_test(trainer, tests), 1e9)))
        now = trainer.requested_batch
        allowed = max(told.minimum, min(wanted, told.maximum))
        if abs(allowed - now) < told.hysteresis * now:
            return
        most = max(now + 1, math.floor(min(now * told.max_growth, told.maximum)))
        new = max(told.minimum, min(allowed, most))
        trainer.requested_batch = max(new, now) if told.grow_only else new

    def _norm_test(self, trainer: Trainer, tests: Sequence[Any]) -> float:
        """S / (eta^2 |G|^2), by all tests or, as published, by those of the round."""
        trace, norm, square, samples, dof = np.array(tests).T
        traces, trace_spread = _mean(trace, dof)
        norms, norm_spread = _mean(norm, samples**2)
        squares, _ = _mean(square, samples**2)
        elapsed = math.log(trainer.samples / trainer.tested_at) if trainer.tested_at else 0.0
        trainer.tested_at = trainer.samples
        _follow_variance(trainer.grad_variance, elapsed, traces, trace_spread, len(tests))
        _follow_norm(trainer.grad_norm_sq, elapsed, norms, squares, norm_spread, len(tests))
        if self.told.rule == "plug-in":
            return traces / (self.told.eta**2 * squares)
        assert trainer.grad_variance.mean is not None
        assert trainer.grad_norm_sq.mean is not None
        if trainer.grad_norm_sq.variance > math.log(3) ** 2:
            return math.inf
        return math.exp(trainer.grad_variance.mean - trainer.grad_norm_sq.mean) / self.told.eta**2

    # Merges.

    def _merge(self) -> None:
        told = self.told
        late = self.rounds - told.first_merge
        due = told.policy != "none" and late >= 0 and late % told.merge_every == 0
        if not due or len(self.trainers) < 2:
            return
        ranked = sorted(self.trainers.values(), key=lambda each: (each.requested_batch, each.id))
        members = ranked[: told.merge_count]
        if told.policy == "largest-with-smallest":
            members = [*ranked[:-1][: told.merge_count - 1], ranked[-1]]
        survivor = max(members, key=lambda each: (each.requested_batch, -each.id))
        total = sum(each.requested_batch for each in members)
        weights = {each.id: each.requested_batch / total for each in members}
        others = [each for each in members if each is not survivor]
        self._mean_of_members(members, survivor, weights)
        if told.requested_batch != "survivor":
            mean = round(sum(weights[each.id] * each.requested_batch for each in members))
            wanted = total if told.requested_batch == "sum" else mean
            survivor.requested_batch = min(wanted, told.maximum)
        freed = sorted(worker for each in others for worker in each.workers)
        for each in others:
            del self.trainers[each.id]
        for worker in freed:
            home = max(
                sorted(self.trainers.values(), key=lambda each: each.id),
                key=lambda each: each.requested_batch / (len(each.workers) + 1),
            )
            home.workers = sorted([*home.workers, worker])
            for each in home.workers:
                self.workers[each].params = home.global_params.copy()
        for worker in survivor.workers:
            self.workers[worker].params = survivor.global_params.copy()
        if told.streams == "balance":
            order = sorted(
                self.trainers.values(),
                key=lambda each: (-each.requested_batch / len(each.workers), each.id),
            )
            readers = [worker for each in order for worker in each.workers]
            read = sorted((each.position, each.stream) for each in self.workers.values())
            for worker, (position, stream) in zip(readers, read, strict=True):
                self.workers[worker].position, self.workers[worker].stream = position, stream

    def load_global(self) -> None:
        """Set all workers to the global parameters of their trainers."""
        for trainer in self.trainers.values():
            for worker in trainer.workers:
                self.workers[worker].params = trainer.global_params.copy()

    def _mean_of_trainers(
        self,
        members: list[Trainer],
        weights: dict[int, float],
        vectors: dict[int, Array],
        wire: Wire | None,
    ) -> Array:
        """Each worker sends its part of its trainer's."""
        homes = {worker: each for each in members for worker in each.workers}
        order = [homes[worker] for worker in sorted(homes)]
        parts = [weights[each.id] / len(each.workers) for each in order]
        mean, _ = exchanged([vectors[each.id] for each in order], parts, wire)
        return mean

    def _mean_of_members(
        self, members: list[Trainer], survivor: Trainer, weights: dict[int, float]
    ) -> None:
        """Parameters, outer momentum, inner state, and what is known of the gradient."""
        told = self.told
        if told.parameters != "survivor":
            uniform = told.parameters == "uniform"
            shares = {each: 1 / len(members) if uniform else weights[each] for each in weights}
            survivor.global_params = self._mean_of_trainers(
                members,
                shares,
                {each.id: each.global_params for each in members},
                self.parameter_wire,
            )
            for name in ("grad_variance", "grad_norm_sq"):
                setattr(survivor, name, _mixture(members, weights, name))
        if told.outer_momentum == "reset":
            survivor.momentum, survivor.stepped = np.zeros(21), np.zeros(21, dtype=bool)
        if told.outer_momentum == "weighted":
            survivor.momentum = self._mean_of_trainers(
                members, weights, {each.id: each.momentum for each in members}, self.momentum_wire
            )
        merged = [self.workers[worker] for each in members for worker in each.workers]
        if told.inner_state == "reset":
            for own in merged:
                own.forget()
        if told.inner_state == "mean":
            share = [weights[each.id] / len(each.workers) for each in members for _ in each.workers]
            for name in ("steps", "first", "second"):
                mean = sum(s * getattr(own, name) for s, own in zip(share, merged, strict=True))
                for own in merged:
                    setattr(own, name, mean)


def _mean(values: Array, weights: Array) -> tuple[float, float]:
    """The weighted mean of tests, and the variance of a test."""
    mean = float(np.average(values, weights=weights))
    square, count = float(np.average(values**2, weights=weights)), len(values)
    return mean, max(0.0, square - mean**2) * count / (count - 1) if count > 1 else 0.0


def _noise(known: Known, value: float, scale: float, spread: float, tests: int) -> float:
    """A test's relative variance: as measured, and as many as four tests of what was before."""
    dof = tests - 1
    if tests == 1 and known.mean is not None:
        level = math.exp(known.mean)
        dof = 1
        spread = max(0.0, (value - level) ** 2 - level**2 * math.expm1(known.variance))
    return max((dof * spread / scale**2 + 4 * known.test_variance) / (dof + 4), 1e-12)


def _follow_variance(known: Known, elapsed: float, value: float, spread: float, tests: int) -> None:
    known.variance += elapsed
    known.test_variance = _noise(known, value, value, spread, tests)
    error = math.log1p(known.test_variance / tests)
    found = math.log(value) + error / 2
    if known.mean is None:
        known.mean, known.variance = found, error
        return
    # The product of two normal distributions.
    precision = 1 / known.variance + 1 / error
    known.mean = (known.mean / known.variance + found / error) / precision
    known.variance = 1 / precision


def _follow_norm(
    known: Known, elapsed: float, value: float, scale: float, spread: float, tests: int
) -> None:
    if known.mean is not None:
        known.mean -= elapsed / 2
        known.variance += 1.5 * elapsed
    known.test_variance = _noise(known, value, scale, spread, tests)
    error = scale * math.sqrt(known.test_variance / tests)
    if known.mean is None:
        known.mean, known.variance = math.log(max(value, error)), 9.0

    def log_density(x: Array) -> Array:
        # The text says it: a normal distribution of x, times the likelihood of the value.
        likelihood = -(((value - np.exp(x)) / error) ** 2) / 2
        return likelihood - (x - known.mean) ** 2 / (2 * known.variance)

    wide = np.linspace(known.mean - 60, known.mean + 30, 90_001)
    weights = log_density(wide)
    near = wide[weights > weights.max() - 40]
    x = np.linspace(near[0] - 1e-3, near[-1] + 1e-3, 40_001)
    weights = log_density(x)
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    known.mean = float(weights @ x)
    known.variance = float(weights @ (x - known.mean) ** 2)


def _mixture(members: list[Trainer], weights: dict[int, float], name: str) -> Known:
    """What a merged model is known to have: a mixture, wider by one."""
    known = {each.id: getattr(each, name) for each in members}
    of = [(weights[id], each) for id, each in known.items() if each.mean is not None]
    if not of:
        return next(iter(known.values()))
    total = sum(weight for weight, _ in of)
    mean = sum(weight * each.mean for weight, each in of) / total
    within = sum(weight * each.variance for weight, each in of) / total
    between = sum(weight * (each.mean - mean) ** 2 for weight, each in of) / total
    noise = sum(weight * each.test_variance for weight, each in of) / total
    return Known(noise, mean, within + between + 1)
