"""Settings of a run, from YAML and `key=value` overrides.

Unknown keys and invalid values are refused before the run starts.
"""

from agent_loop.config.algorithm import AlgorithmConfig
from agent_loop.config.data import DataConfig, SamplerConfig
from agent_loop.config.distillation import DistillationConfig, TeacherConfig
from agent_loop.config.load import load_config
from agent_loop.config.model import ModelConfig
from agent_loop.config.optim import ActorConfig, CorrectionConfig, CriticConfig, OptimConfig
from agent_loop.config.placement import PlacementConfig, SplitConfig
from agent_loop.config.reward import RewardConfig
from agent_loop.config.rollout import (
    AgentConfig,
    CustomServerConfig,
    MultiTurnConfig,
    RolloutConfig,
    TraceConfig,
    ValSamplingConfig,
)
from agent_loop.config.sft import SftConfig
from agent_loop.config.trainer import RayConfig, TrainerConfig
from agent_loop.config.validation import all_keys, parse_options, parse_section
from agent_loop.config.values import (
    MAX_SAMPLES,
    AggregationMode,
    ChatEndpoint,
    Divergence,
    KLEstimator,
    Level,
    NotNegative,
    OnWeightUpdate,
    Positive,
    PositiveSeconds,
    Replicas,
    Section,
    Seed,
    Temperature,
    Tokens,
    WeightTransfer,
)
from agent_loop.config.whole import Config

__all__ = [
    "MAX_SAMPLES",
    "ActorConfig",
    "AgentConfig",
    "AggregationMode",
    "AlgorithmConfig",
    "ChatEndpoint",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "CustomServerConfig",
    "DataConfig",
    "DistillationConfig",
    "Divergence",
    "KLEstimator",
    "Level",
    "ModelConfig",
    "MultiTurnConfig",
    "NotNegative",
    "OnWeightUpdate",
    "OptimConfig",
    "PlacementConfig",
    "Positive",
    "PositiveSeconds",
    "RayConfig",
    "Replicas",
    "RewardConfig",
    "RolloutConfig",
    "SamplerConfig",
    "Section",
    "Seed",
    "SftConfig",
    "SplitConfig",
    "TeacherConfig",
    "Temperature",
    "Tokens",
    "TraceConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "WeightTransfer",
    "all_keys",
    "load_config",
    "parse_options",
    "parse_section",
]
