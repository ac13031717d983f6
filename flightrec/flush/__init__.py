"""From a verdict on the device to messages for the writer."""
