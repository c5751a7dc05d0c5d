"""The public names of adloco, which `import adloco` provides; everything else may change."""

from adloco.algorithms.adloco import AdLoCo
from adloco.algorithms.diloco import DiLoCo
from adloco.algorithms.inner.adamw import InnerAdamW
from adloco.algorithms.inner.muon import InnerMuon
from adloco.algorithms.inner.sgd import InnerSGD
from adloco.algorithms.method import (
    Batching,
    Execution,
    GradientTest,
    Merging,
    Method,
    OuterMemory,
    Problem,
    Source,
    Syncing,
)
from adloco.algorithms.optimizers import OuterOptimizer
from adloco.algorithms.reports import RoundReport
from adloco.data.sources import TensorSource
from adloco.distributed.launch.launcher import place, process_group
from adloco.distributed.placement.placement import OneProcess
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.topk import TopK
from adloco.errors import NonFiniteLossError
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.batch_rules.warmup import BatchWarmup
from adloco.rules.controller import BatchController, BatchGuards
from adloco.rules.learning_rate import LearningRate
from adloco.rules.merge import MergeFates
from adloco.rules.merge_policies.largest_with_smallest import MergeLargestWithSmallest
from adloco.rules.merge_policies.smallest import MergeSmallest
from adloco.rules.moments import estimate, group_moments
from adloco.rules.shares import SpeedShares
from adloco.rules.switch import SwitchMode
from adloco.rules.sync_schedule import Streaming

__all__ = [
    "AdLoCo",
    "BatchController",
    "BatchGuards",
    "BatchWarmup",
    "Batching",
    "Bf16",
    "ConstantBatch",
    "DiLoCo",
    "Execution",
    "Feedback",
    "GradientTest",
    "InnerAdamW",
    "InnerMuon",
    "InnerSGD",
    "Int1",
    "Int2",
    "Int4",
    "Int8",
    "LearningRate",
    "MergeFates",
    "MergeLargestWithSmallest",
    "MergeSmallest",
    "Merging",
    "Method",
    "NonFiniteLossError",
    "NormTest",
    "OneProcess",
    "OuterMemory",
    "OuterOptimizer",
    "Problem",
    "RoundReport",
    "Source",
    "SpeedShares",
    "Streaming",
    "SwitchMode",
    "Syncing",
    "TensorSource",
    "TopK",
    "estimate",
    "group_moments",
    "place",
    "process_group",
]
