"""This package keeps a run: its folder, its checkpoints, and what happens to it.

folder, reader    write and read the files of RUN (docs/run_folder.md); history: starts, faults and goodput from its events
metrics           the rows of metrics.jsonl and TensorBoard
checkpoint        TorchTitan's manager with our retention and fallback; identity: which model a checkpoint holds
integrity         hashes of checkpoint files; safe_dcp: reads their metadata without unpickling code
guard             no weights change in a step that is not finite, on any rank
liveness          heartbeat, slow ranks, the clock, and requests to stop
"""
