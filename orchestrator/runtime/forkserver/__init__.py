"""The fork server: training processes that start in milliseconds and never outlive their owner.

Everything in this folder runs in the *user's* interpreter, which may have torch but not orch: it imports the standard
library and torch, nothing else, and reaches its own modules as the private package `_orch_forkserver` (see server.py),
so that none of its module names can shadow a `server.py`, `utils.py` or `keeper.py` beside a training script.

Theory of operation
===================

Three kinds of process, each forked from the one before::

    F  fork server   one per node and interpreter; single-threaded; has imported torch; holds no data of a job
    └─ K  keeper     one per training process; its parent, its reaper, and the subreaper of all it starts
       └─ T          the training process: a session of its own; behaves as if started by hand

F forks because importing torch takes a second or two and forking takes milliseconds. A fork copies only the calling
thread, so F must be single-threaded when it forks: it checks /proc/self/task after warming and does not serve
otherwise. It never touches a GPU, because a CUDA context does not survive a fork.

K exists so that no exit status is lost and no process is left behind, whichever process dies:

* T dies: K is its parent, so the kernel notifies K at once. K writes the exit record (fsync) before it notifies the owner, so
  that the exit status survives the death of every reader. Then it kills what T left behind.
* The owner dies, or closes its end of the lifeline (a socket): K kills everything below itself. Processes that called
  setsid or forked twice are not lost: K is a subreaper, so the kernel hands them to K when their parent dies.
* K dies: T gets SIGKILL, its parent-death signal; the other processes below K become children of F, a subreaper too,
  which kills them.
* F dies: only its spares end. Keepers and jobs continue; the next rank actor starts another F.

When no request has arrived for one second, F forks ahead: for each running process, one K with its T, which wait for
a request (spares.py). A restarted gang uses them: the forks, and most first writes to shared pages, are already done.

T must not be able to detect that it was forked. program/interpreter.py restores what a fresh interpreter would have, and
program/cold_start.py finds what cannot be restored (an environment variable that was read when torch was imported, a module
beside the script that shadows one already imported); T then executes a plain interpreter, which is slower and exact.

A script can still find one stack frame below its own, the hash seed that it shares with its neighbours, two functions of
torch.distributed that call torch's own (torch_changes/), and the server's environment in
/proc/self/environ. Memory that the server had allocated keeps its addresses.

The modules, from the top: server.py (bootstrap; owns the stack frame below the user's code), serve.py (F's loop), spares.py (K and T
before their request), startup.py (how F becomes the one server of its socket), warm.py (what F does before it serves), keeper.py (K),
program/ (T up to the user's code: launch.py, interpreter.py and cold_start.py for the Python process, rendezvous_store.py for the process
that serves torch's store, stop_notes.py for handlers of SIGTERM), torch_changes/ (functions that are replaced: teardown.py against a
race at the end of torch programs, collective_calls.py to record the collective that a rank has entered, debugger.py to connect `pdb` to
the rank's terminal), and below them deadline.py (the time at which a rank is killed), request.py, reports.py, masking.py, page.py,
cgroups.py, proctree.py, linux.py and wire.py.
"""
