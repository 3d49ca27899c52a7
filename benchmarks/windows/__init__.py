"""Windows of iterates chosen after training: what they gain, how exact they are, and a peer."""
