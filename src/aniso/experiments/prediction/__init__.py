"""``aniso predict``: inputs, the model that a directory holds, output that can be continued."""
