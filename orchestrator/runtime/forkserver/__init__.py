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
* F dies: keepers and jobs continue; the next rank actor starts another F.

T must not be able to detect that it was forked. launch.py restores what a fresh interpreter would have, and warm.py finds what cannot be
restored (an environment variable that was read when torch was imported, a module beside the script that shadows one already imported); T then
executes a plain interpreter, which is slower and exact.

A script can still find one stack frame below its own, the hash seed that it shares with its neighbours, two functions of the `signal` module
that call Python's own, one of torch's hooks for modules in use (warm.py), and the server's command line and environment in /proc/self. Memory
that the server had allocated keeps its addresses. No function of torch is replaced.

The modules, from the top: server.py (bootstrap; owns the stack frame below the user's code), serve.py (F: how it becomes the one server of its
socket, and its loop), keeper.py (K), launch.py (T up to the user's code, and the state of a fresh interpreter; also the process that serves torch's
store), warm.py (what F does before it serves, and when a fork would differ from a fresh interpreter), and below them reports.py, holder.py,
masking.py, cgroups.py, linux.py and wire.py.
"""
