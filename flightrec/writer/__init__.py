"""The process that writes incidents and outlives the trainer; never imports torch."""
