"""The nvdlfw_inspect route: the feature ``FlightRecorder`` of Transformer Engine's debug mode, and its recorder."""
