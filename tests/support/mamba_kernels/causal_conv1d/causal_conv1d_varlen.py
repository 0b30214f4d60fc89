"""Only for generation, which Megatron-Core does not do here."""

causal_conv1d_varlen_states = None
