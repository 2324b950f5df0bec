"""Programs that attack the sandbox, the machine and the run. ``$name`` stands for what the test has prepared.

``attempt`` prints "refused", or "REACHED" for what must not work. A program that never ends is ``endless``.
"""

import platform
from dataclasses import dataclass

from grpo_dist.environments.sandbox import kernel

PRELUDE = """
import ctypes, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def attempt(*actions):
    for action in actions:
        try:
            result = action()
        except Exception as error:
            print("refused", type(error).__name__)
        else:
            print("REACHED", repr(result)[:200])

def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def write(path):
    with open(path, "w") as file:
        return file.write("attacked")

def read(path):
    with open(path, "rb") as file:
        return file.read(100)

def connect(kind, address, type=socket.SOCK_STREAM):
    made = socket.socket(kind, type)
    made.settimeout(5)
    made.connect(address)
    if type == socket.SOCK_DGRAM:
        made.send(b"attacked")

def descriptors():
    return [n for n in range(3, 256) if is_open(n)]

def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
"""


@dataclass(frozen=True)
class Attack:
    """``outcomes``: the accepted ones; ``shown``: text that the output must have."""

    name: str
    code: str
    outcomes: tuple[str, ...] = ("ok",)
    shown: str = ""
    endless: bool = False


REFUSED_CALLS = sorted(
    numbers[0 if platform.machine() == "x86_64" else 1]
    for name, numbers in kernel._NUMBERS.items()
    if numbers[0 if platform.machine() == "x86_64" else 1] is not None and name != "vhangup"
)

ATTACKS = [
    # processes
    Attack("fork bomb", "while True:\n try: os.fork()\n except OSError: pass", ("timeout",), endless=True),
    Attack(
        "as many processes as there can be",
        "count = 0\ntry:\n  while True:\n    if not os.fork(): time.sleep(900)\n    count += 1\n"
        "except OSError: print('at most', count < $processes)",
        shown="at most True",
    ),
    Attack(
        "as many threads as there can be",
        "count = 0\ntry:\n  while True:\n    threading.Thread(target=time.sleep, args=(900,)).start()\n"
        "    count += 1\nexcept RuntimeError: print('at most', count < $processes)",
        shown="at most True",
    ),
    Attack("kills its parent", "os.kill(os.getppid(), 9); time.sleep(0.2)", ("ok", "error", "died")),
    Attack(
        "sends its parent every signal",
        "for number in range(1, 65):\n try: os.kill(os.getppid(), number)\n except OSError: pass",
        ("ok", "died"),
    ),
    Attack(
        "stops its parent",
        "os.kill(os.getppid(), signal.SIGSTOP)\nos.kill(os.getppid(), signal.SIGSTOP)\nprint('on')",
        ("ok", "error"),
    ),
    Attack("kills everybody", "os.kill(-1, 9)", ("ok", "error")),
    Attack("kills its group", "os.killpg(0, 9)", ("died", "error")),
    Attack("kills its parent's group", "os.killpg(os.getpgid(os.getppid()), 9)", ("ok", "error", "died")),
    Attack(
        "kills a process of the machine",
        "attempt(lambda: os.kill($victim, 9), lambda: os.kill($owner, 0))",
        shown="refused",
    ),
    Attack("ends at once", "os._exit(0)", ("died",), "exit status 0"),
    Attack("asks to exit", "sys.exit(0)"),
    Attack("exits with an error", "sys.exit('bad')", ("error",), "bad"),
    Attack("aborts", "os.abort()", ("died",), "SIGABRT"),
    Attack("becomes another program", "os.execv('/bin/sh', ['sh', '-c', 'exit 0'])", ("died",)),
    Attack("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",), endless=True),
    Attack(
        "ignores all signals",
        "for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        ("timeout",),
        endless=True,
    ),
    Attack("leaves a function for its exit", "import atexit\natexit.register(time.sleep, 900)\nsys.exit()"),
    Attack(
        "leaves a daemon",
        "if not os.fork():\n  os.setsid()\n  if not os.fork():\n    os.setsid()\n    time.sleep(900)\n"
        "  os._exit(0)",
    ),
    Attack(
        "leaves a thread that prints",
        "def talk():\n  while True: print('x' * 10000)\nthreading.Thread(target=talk, daemon=True).start()",
    ),
    # the interpreter itself
    Attack(
        "imports what nothing has imported",  # no attack: Python's files stay readable
        "import colorsys, wave\ncolorsys.rgb_to_hsv(1, 0, 0)",
        shown="(0.0, 1.0, 1",
    ),
    Attack("sleeps", "time.sleep(900)", ("timeout",), endless=True),
    Attack("computes in C without an end", "9**9**9", ("timeout",), endless=True),
    Attack(
        "counts in C without an end", "import itertools\nsum(itertools.count())", ("timeout",), endless=True
    ),
    Attack("searches without an end", "import re\nre.match('(a|a)*b', 'a' * 60)", ("timeout",), endless=True),
    Attack("recurses without an end", "def f(): return f()\nf()", ("error",), "RecursionError"),
    Attack(
        "recurses below the stack",
        "sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())",
        ("died", "memory", "error"),
    ),
    Attack("reads address 0", "ctypes.string_at(0)", ("died",), "SIGSEGV"),
    Attack("reads from its terminal", "input()", ("error",), "EOFError"),
    Attack("reads all of its input", "sys.stdin.read()", ("ok",), "''"),
    Attack("nests without an end", "eval('(' * 100000)", ("error", "memory", "died")),
    Attack("is no text of Python", "x = '\\0' \n\x00", ("error",), "SyntaxError"),
    # memory
    Attack("takes memory", "x = bytearray(2**40)", ("memory",), "MemoryError"),
    Attack("takes memory piece by piece", "x = []\nwhile True: x.append(bytes(2**20))", ("memory",)),
    Attack(
        "takes memory in children",
        "for _ in range(6):\n  if not os.fork():\n    x = bytearray(os.urandom(2**20)) * ($memory // 2)\n"
        "    time.sleep(900)\ntime.sleep(900)",
        ("memory",),
        "all processes together",
    ),
    Attack(
        "takes memory that no process has",
        "attempt(lambda: os.memfd_create('x'), lambda: call($shmget, 0, 2**30, 0o1600))",
        shown="refused",
    ),
    Attack("makes an enormous number", "x = 1 << 10**13", ("memory", "error")),
    # limits
    Attack(
        "raises its limits",
        "import resource\nattempt(*[lambda n=n: resource.setrlimit(n, (2**40, 2**40)) for n in "
        "(resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)])",
        shown="refused",
    ),
    # files
    Attack(
        "writes a large file",
        "try:\n  with open('x', 'wb') as f:\n    while True: f.write(bytes(2**20))\n"
        "except OSError as error: print('full', os.stat('x').st_size <= $files * 2**20)",
        shown="full True",
    ),
    Attack(
        "fills the disk with many files",
        "for n in range(400):\n  with open(f'{n}', 'wb') as f: f.write(bytes($files * 2**18))\n"
        "time.sleep(900)",
        ("error",),
    ),
    Attack("makes very many files", "for n in range(10000): open(f'{n}', 'w').close()", ("ok", "error")),
    Attack(
        "makes directories too deep for a path",
        "for n in range(300):\n  os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('x', 'w').write('x')",
        ("ok", "error"),
    ),
    Attack(
        "leaves directories that cannot be entered",
        "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.symlink('$outside', 'a/l')\n"
        "try: os.chmod('a/b', 0); os.chmod('a', 0)\nexcept PermissionError: pass",
    ),
    Attack(
        "writes outside",
        "attempt(lambda: write('$outside/new'), lambda: write('$outside/file'), lambda: write('/usr/lib/x'), "
        "lambda: write('/etc/x'), lambda: write(os.__file__), lambda: os.mkdir('$outside/d'), "
        "lambda: os.mknod('$outside/n'), lambda: write('/dev/shm/../x'))",
        shown="refused",
    ),
    Attack(
        "writes outside over links",
        "os.symlink('$outside', 'out')\nattempt(lambda: write('out/new'), lambda: write('out/file'), "
        "lambda: os.link('$outside/file', 'mine'), lambda: os.rename('$outside/file', 'moved'), "
        "lambda: os.rename('out/file', 'out/other'))",
        shown="refused",
    ),
    Attack(
        "deletes and changes files outside",
        "import shutil\nattempt(lambda: os.unlink('$outside/file'), lambda: shutil.rmtree('$outside'), "
        "lambda: os.truncate('$outside/file', 0), lambda: os.chmod('$outside/file', 0o777), "
        "lambda: os.chown('$outside/file', os.getuid(), -1), lambda: os.utime('$outside/file', (5, 5)), "
        "lambda: os.setxattr('$outside/file', 'user.x', b''))",
        shown="refused",
    ),
    Attack(
        "reads files outside",
        "attempt(lambda: read('$outside/file'), lambda: os.listdir('$outside'), lambda: read('/etc/shadow'), "
        "lambda: os.listdir('/root/.ssh'), lambda: os.listdir('/home'))",
        shown="refused",
    ),
    Attack(
        "looks for a way to the old root",
        "attempt(lambda: os.chroot('.'), lambda: read('/proc/1/root$outside/file'), "
        "lambda: os.listdir('/proc/1/cwd/1'), lambda: os.listdir('/.old'), "
        "lambda: read('../' * 50 + '$outside/file'))",
        shown="refused",
    ),
    Attack(
        "reads other processes",
        "attempt(lambda: read('/proc/$victim/environ'), lambda: read('/proc/$owner/environ'), "
        "lambda: os.listdir('/proc/$owner/fd'), lambda: read(f'/proc/{os.getppid()}/mem'), "
        "lambda: read(f'/proc/{os.getppid()}/maps'), lambda: os.listdir(f'/proc/{os.getppid()}/fd'))",
        shown="refused",
    ),
    Attack(
        "configures the kernel",
        "attempt(lambda: write('/proc/sys/kernel/core_pattern'), lambda: write('/proc/sysrq-trigger'), "
        "lambda: write('/sys/kernel/mm/ksm/run'), lambda: read('/dev/mem'), lambda: read('/dev/kmsg'), "
        "lambda: os.mknod('disk', 0o60600, os.makedev(8, 0)), lambda: socket.sethostname('x'), "
        "lambda: time.clock_settime(time.CLOCK_REALTIME, 0))",
        shown="refused",
    ),
    # network
    Attack(
        "connects to the machine and beyond",
        "attempt(lambda: connect(socket.AF_INET, ('127.0.0.1', $port)), "
        "lambda: connect(socket.AF_INET6, ('::1', $port)), "
        "lambda: connect(socket.AF_INET, ('127.0.0.1', $port), socket.SOCK_DGRAM), "
        "lambda: connect(socket.AF_INET, ('192.0.2.1', 53), socket.SOCK_DGRAM), "
        "lambda: socket.create_server(('127.0.0.1', 0)), lambda: socket.getaddrinfo('example.org', 80))",
        shown="refused",
    ),
    Attack(
        "opens sockets of other kinds",
        "attempt(*[lambda f=f, t=t: socket.socket(f, t) for f, t in ((2, 3), (10, 3), (16, 3), (17, 3), "
        "(38, 5), (40, 1), (44, 2), (29, 3), (15, 3))], lambda: call($socket, 2, 1, 0))",
        shown="refused",
    ),
    Attack(
        "connects to Unix sockets of the machine",
        "attempt(lambda: connect(socket.AF_UNIX, '$unix'), lambda: connect(socket.AF_UNIX, '\\0$abstract'))\n"
        "def turn(kind):\n  a, b = socket.socketpair(socket.AF_UNIX, kind)\n  a.connect('\\0$abstract')\n"
        "attempt(lambda: turn(socket.SOCK_DGRAM), lambda: turn(socket.SOCK_STREAM))",
        shown="refused",
    ),
    # the kernel
    Attack(
        "makes system calls that a calculation does not need",
        "attempt(*[lambda n=n: call(n, 0, 0, 0, 0, 0) for n in $calls])",
        shown="refused",
    ),
    Attack(
        "enters namespaces",
        "attempt(lambda: call($clone, 0x10000011, 0, 0, 0, 0), lambda: call(435, b'\\0' * 88, 88), "
        "lambda: call($unshare, 0x10000000))",
        shown="refused",
    ),
    Attack(
        "becomes root",
        "attempt(lambda: os.setgroups([0]), "
        "lambda: call($capset, ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), "
        "ctypes.byref((ctypes.c_uint32 * 6)(2**21, 2**21, 2**21))))\n"
        "if os.getuid(): attempt(lambda: os.setuid(0))",
        shown="refused",
    ),
    Attack(
        "traces its parent",
        "attempt(lambda: call($ptrace, 16, os.getppid(), 0, 0), "
        "lambda: call($ptrace, 0x4206, $victim, 0, 0))",
        shown="refused",
    ),
    # replies
    Attack(
        "writes to every descriptor",
        'for n in descriptors():\n  try: os.write(n, b\'["ok", "FORGED"]\' * 100)\n  except OSError: pass',
        ("died", "error", "ok"),
    ),
    Attack(
        "writes to every descriptor later",
        "def later():\n  while True:\n    for n in descriptors():\n      try: os.write(n, b'FORGED' * 10)\n"
        "      except OSError: pass\n    time.sleep(0.001)\nthreading.Thread(target=later).start()\n"
        "time.sleep(0.2)",
        ("died", "error", "ok"),
    ),
    Attack(
        "floods its replies",
        "for n in descriptors():\n  if n > 3:\n    try:\n      while True: os.write(n, bytes(2**20))\n"
        "    except OSError: pass",
        ("died",),
    ),
    Attack(
        "begins a reply and waits",
        "for n in descriptors():\n  try: os.write(n, b'FOR')\n  except OSError: pass\ntime.sleep(900)",
        ("timeout", "died"),
        endless=True,
    ),
    Attack(
        "replies itself, twice, with the token that it finds",
        "frame, found = sys._getframe(), []\nwhile frame:\n  found += [v for v in frame.f_locals.values() "
        "if isinstance(v, bytes) and len(v) == 16]\n  frame = frame.f_back\nimport struct\n"
        'body = b\'["ok", "FORGED"]\'\nfor n in descriptors():\n  for token in found:\n    try:\n'
        "      os.write(n, (struct.pack('!16sQ', token, len(body)) + body) * 2)\n    except OSError: pass",
        ("died", "error", "ok"),
    ),
    Attack("closes all descriptors", "os.closerange(0, 256); time.sleep(900)", ("died",)),
    Attack(
        "exchanges its descriptors",
        "for n in descriptors():\n  for m in descriptors():\n    try: os.dup2(n, m)\n"
        "    except OSError: pass",
        ("died", "error", "timeout"),
        endless=True,
    ),
    Attack(
        "looks for secrets in its memory",
        "import gc\nwords = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "text = repr([v for d in words for v in list(d.values()) if isinstance(v, str)])\n"
        "print('found' if 'swordfish' + '-7' in text else 'nothing')",
        shown="nothing",
    ),
    Attack(
        "looks for secrets in its environment",
        "print('found' if any('sword' + 'fish' in v for v in os.environ.values()) else 'nothing')\n"
        "attempt(lambda: 'sword' + 'fish' in read('/proc/self/environ').decode() or 1 / 0)",
        shown="nothing",
    ),
    Attack(
        "changes the modules of the sandbox",
        "import grpo_dist.environments.sandbox.worker as w, grpo_dist.environments.sandbox.cells as c\n"
        "w.write = w.read = c.Cells.run = lambda *_: 'FORGED'\nw.INNER = None",
        ("died", "error", "ok"),
    ),
    Attack("clears the modules", "sys.modules.clear()", ("ok", "error", "died")),
    Attack(
        "changes json and struct",
        'import json, struct\njson.dumps = lambda *_, **__: \'["ok", {"FORGED": 1}]\'\n'
        "json.loads = lambda *_: ['run', '1']\nstruct.pack = None",
        ("ok", "error"),
    ),
    Attack(
        "changes what is built in",
        "import builtins\nfor name in ('print', 'open', 'repr', 'len', 'isinstance', 'compile', 'exec'):\n"
        "  setattr(builtins, name, lambda *_, **__: 1 / 0)",
        ("ok", "error", "died"),
    ),
    Attack(
        "traces the sandbox",
        "def trace(frame, event, argument):\n  raise SystemExit('FORGED')\nsys.settrace(trace)\n"
        "sys.setprofile(trace)",
        ("ok", "error", "died"),
    ),
    Attack("replaces its output", "sys.stdout = sys.stderr = None\nsys.__stdout__ = 5\n1", ("ok", "error")),
    Attack("closes its output", "sys.stdout.close()\n1", ("error",)),
    # output
    Attack("prints 100 MB", "for _ in range(100): print('x' * 1_000_000)", shown="bytes of output cut"),
    Attack("prints without an end", "while True: print('x' * 1000)", ("timeout",), endless=True),
    Attack("prints in a child without an end", "os.system('yes')", ("timeout",), endless=True),
    Attack("prints bytes that are no text", "os.write(1, bytes(range(256)))", shown="\\x00"),
    Attack("prints half a character", "os.write(1, '€'.encode()[:1])", shown="1"),
    Attack("prints surrogates", "print('\\ud800')", shown="\\ud800"),
    Attack(
        "raises an error whose text is an attack",
        "class E(Exception):\n  def __str__(self): os._exit\n  __repr__ = __str__\n"
        "  def __getattribute__(self, name): raise SystemExit(0)\nraise E",
        ("error", "ok"),
    ),
    Attack(
        "ends with a value whose text is an attack",
        "class V:\n  def __repr__(self): raise KeyboardInterrupt\nV()",
        ("error",),
        "KeyboardInterrupt",
    ),
    Attack(
        "raises errors without an end",
        "e = ValueError()\nfor _ in range(3000):\n  n = ValueError(); n.__context__ = e; e = n\nraise e",
        ("error", "died", "memory"),
    ),
]
