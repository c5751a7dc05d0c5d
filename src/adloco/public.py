"""The public names of adloco, which `import adloco` provides; everything else may change."""

from adloco.algorithms.adloco import AdLoCo as AdLoCo
from adloco.algorithms.diloco import DiLoCo as DiLoCo
from adloco.algorithms.inner.adamw import InnerAdamW as InnerAdamW
from adloco.algorithms.inner.muon import InnerMuon as InnerMuon
from adloco.algorithms.inner.sgd import InnerSGD as InnerSGD
from adloco.algorithms.method import Batching as Batching
from adloco.algorithms.method import Execution as Execution
from adloco.algorithms.method import GradientTest as GradientTest
from adloco.algorithms.method import Merging as Merging
from adloco.algorithms.method import Method as Method
from adloco.algorithms.method import OuterMemory as OuterMemory
from adloco.algorithms.method import Problem as Problem
from adloco.algorithms.method import Source as Source
from adloco.algorithms.method import Syncing as Syncing
from adloco.algorithms.optimizers import OuterOptimizer as OuterOptimizer
from adloco.algorithms.reports import RoundReport as RoundReport
from adloco.data.sources import TensorSource as TensorSource
from adloco.distributed.launch.launcher import place as place
from adloco.distributed.launch.launcher import process_group as process_group
from adloco.distributed.placement.placement import OneProcess as OneProcess
from adloco.distributed.wire.bf16 import Bf16 as Bf16
from adloco.distributed.wire.feedback import Feedback as Feedback
from adloco.distributed.wire.int1 import Int1 as Int1
from adloco.distributed.wire.int2 import Int2 as Int2
from adloco.distributed.wire.int4 import Int4 as Int4
from adloco.distributed.wire.int8 import Int8 as Int8
from adloco.errors import NonFiniteLossError as NonFiniteLossError
from adloco.rules.batch_rules.constant import ConstantBatch as ConstantBatch
from adloco.rules.batch_rules.norm_test import NormTest as NormTest
from adloco.rules.batch_rules.warmup import BatchWarmup as BatchWarmup
from adloco.rules.controller import BatchController as BatchController
from adloco.rules.controller import BatchGuards as BatchGuards
from adloco.rules.learning_rate import LearningRate as LearningRate
from adloco.rules.merge import MergeFates as MergeFates
from adloco.rules.merge_policies.largest_with_smallest import (
    MergeLargestWithSmallest as MergeLargestWithSmallest,
)
from adloco.rules.merge_policies.smallest import MergeSmallest as MergeSmallest
from adloco.rules.moments import estimate as estimate
from adloco.rules.moments import group_moments as group_moments
from adloco.rules.shares import SpeedShares as SpeedShares
from adloco.rules.switch import SwitchMode as SwitchMode
from adloco.rules.sync_schedule import Streaming as Streaming
