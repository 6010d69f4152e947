"""Settings of a run, from YAML and `key=value` overrides.

Unknown keys and invalid values are refused before the run starts.
"""

from agent_loop.config.load import load_config
from agent_loop.config.placement import PlacementConfig, RayConfig, SplitConfig, TrainerConfig
from agent_loop.config.rollout import (
    AgentConfig,
    CustomServerConfig,
    MultiTurnConfig,
    RolloutConfig,
    TraceConfig,
    ValSamplingConfig,
)
from agent_loop.config.task import DataConfig, ModelConfig, RewardConfig, SamplerConfig
from agent_loop.config.training import (
    ActorConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DistillationConfig,
    OptimConfig,
    SftConfig,
    TeacherConfig,
)
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
