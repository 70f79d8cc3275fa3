"""What a save and a resume cost, beside other ways to do them and beside what the machine can do: see ``run``."""
