/* The native part of the cpu device: replays lists of kernels, and provides them with parallel loops and scratch memory.
 *
 * It is linked into every kernel library. A process uses the copy in the library that it loaded first: cpu.py sets the function pointers
 * through which kernels call TVM's backend API (TVMBackendParallelLaunch and so on, whose signatures these functions have).
 *
 * Decoding a token of a small model runs about fifty jobs of a few microseconds each, so starting and joining a job must take less than one
 * microsecond. The main thread publishes the job in one cache line, on which the other threads spin; each claims the task of its index, and
 * reports its completion, in a cache line of its own. Idle threads steal the tasks of threads that have not started, which on a busy machine
 * may not be scheduled for milliseconds. Long jobs are split into more tasks than threads, distributed dynamically, for load balance. Tasks
 * must not wait for one another.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum {
    LINE = 128,           /* bytes: processors fetch cache lines of 64 bytes in pairs */
    MAX_THREADS = 1024,
    STEAL_SPINS = 30,     /* polls of an unclaimed task before the main thread steals it: about 1 us */
    SPINS = 200,          /* polls before a waiting thread yields its core: 5 to 10 us */
    YIELDS = 2000,        /* yields before it sleeps: a few milliseconds */
    BETWEEN = 32,         /* polls between two yields: without them the next step is 5 % slower */
    TASK_NS = 50000,      /* target duration of a task of a long job, in ns */
    MAX_TASKS = 8,        /* upper limit of the tasks per thread of a long job */
    HISTORY = 1024,       /* entries of the table of job durations */
    ALIGN = 128,          /* bytes: alignment of scratch memory */
    KEPT = 8,             /* scratch buffers that a thread keeps for later calls */
};

typedef struct {
    void *unused;
    int32_t tasks;
} Group;                  /* TVMParallelGroupEnv */

typedef int (*Job)(int task, Group *group, void *data);

static struct {
    _Alignas(LINE) atomic_uint number;      /* of the job; a new number publishes the fields below */
    Job job;
    void *data;
    Group group;
    _Alignas(LINE) atomic_int next;         /* the next unclaimed task, from `threads` on */
    _Alignas(LINE) atomic_int sleeping;     /* number of threads */
    _Alignas(LINE) int threads;             /* including the main thread */
    atomic_int quit;
    pthread_mutex_t launching, lock;
    pthread_cond_t wake;
} pool = {.threads = 1, .launching = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

/* The state of thread i, and of task i of the current job. Another thread may run task i. */
static struct {
    _Alignas(LINE) atomic_uint taken;       /* number of the last job whose task i was claimed, by raising this */
    _Alignas(LINE) atomic_uint done;        /* number of the last job whose task i is complete; `pool` is not changed before all are */
    int failed;
    pthread_t thread;
} members[MAX_THREADS];

static int64_t last_ns[HISTORY];            /* duration of the last run of a job, by a hash of its address */

static _Thread_local int inside;            /* this thread runs a task */

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits for a job after number `last`, and returns its number. */
static unsigned next_job(unsigned last) {
    unsigned now;
    for (int i = 0; i < SPINS + YIELDS * BETWEEN; i++) {
        if ((now = atomic_load_explicit(&pool.number, memory_order_acquire)) != last) return now;
        if (i < SPINS || i % BETWEEN) relax();
        else sched_yield();
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while ((now = atomic_load(&pool.number)) == last) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
    return now;
}

static void announce(void) {
    atomic_fetch_add(&pool.number, 1);
    if (atomic_load(&pool.sleeping)) {      /* sequentially consistent: a thread about to sleep sees the number, or is counted here */
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
}

/* Claims the task of this member for the caller. Returns false if it is taken already, or if the job is over. */
static int take(int member, unsigned job) {
    unsigned before = job - 1;
    return atomic_load_explicit(&members[member].taken, memory_order_relaxed) == before &&
           atomic_compare_exchange_strong(&members[member].taken, &before, job);
}

/* Runs the task of this member, which the caller has claimed, and then unclaimed tasks of the job. */
static void work(int member, unsigned job) {
    int failed = 0;
    inside = 1;
    for (int task = member; task < pool.group.tasks; task = atomic_fetch_add(&pool.next, 1)) {
        failed |= pool.job(task, &pool.group, pool.data);
        if (pool.group.tasks <= pool.threads) break;
    }
    inside = 0;
    members[member].failed = failed;
    atomic_store_explicit(&members[member].done, job, memory_order_release);
}

static void *member_main(void *argument) {
    int me = (int)(intptr_t)argument;
    for (unsigned job = atomic_load(&members[me].done);;) {
        job = next_job(job);
        if (atomic_load(&pool.quit)) return NULL;
        if (take(me, job)) work(me, job);
    }
}

static void stop(void) {
    atomic_store(&pool.quit, 1);
    announce();
    for (int i = 1; i < pool.threads; i++) pthread_join(members[i].thread, NULL);
    atomic_store(&pool.quit, 0);
    pool.threads = 1;
}

/* After a fork, the child has only the thread that called fork. */
static void after_fork(void) {
    pool.threads = 1;
    atomic_store(&pool.sleeping, 0);
    pthread_mutex_init(&pool.launching, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
}

/* Resizes the pool to `threads` threads, including the caller. Returns the new size, which is lower if the system grants no more threads. */
int mlc_amd_start_threads(int threads) {
    static int prepared;
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_lock(&pool.launching);
    if (!prepared) pthread_atfork(NULL, NULL, after_fork);
    prepared = 1;
    if (threads != pool.threads) {
        stop();
        unsigned number = atomic_load(&pool.number);
        for (int i = 0; i < threads; i++) {
            atomic_store(&members[i].taken, number);
            atomic_store(&members[i].done, number);
        }
        sigset_t all, before;               /* signals are for the main thread, but for a fault of the thread's own: */
        sigfillset(&all);                   /* a page of the weights that cannot be read (tools/bus_error.py) */
        sigdelset(&all, SIGBUS);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (pool.threads < threads &&
               !pthread_create(&members[pool.threads].thread, NULL, member_main, (void *)(intptr_t)pool.threads)) {
            pool.threads++;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    threads = pool.threads;
    pthread_mutex_unlock(&pool.launching);
    return threads;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* TVMBackendParallelLaunch: runs job(task, group, data) for each task of a group, whose size it chooses. Returns -1 if a task fails. */
int mlc_amd_launch(Job job, void *data, int tasks) {
    (void)tasks;
    int serially = inside || pthread_mutex_trylock(&pool.launching);                  /* nested or busy */
    if (!serially && pool.threads == 1) {
        pthread_mutex_unlock(&pool.launching);
        serially = 1;
    }
    if (serially) {
        Group serial = {NULL, 1};
        return job(0, &serial, data) ? -1 : 0;
    }
    int64_t *took = &last_ns[((uintptr_t)job >> 4) % HISTORY], start = now_ns();      /* a collision only affects the split */
    int each = *took < 2 * TASK_NS ? 1 : *took > MAX_TASKS * TASK_NS ? MAX_TASKS : (int)(*took / TASK_NS);
    pool.job = job;
    pool.data = data;
    pool.group.tasks = pool.threads * each;
    atomic_store_explicit(&pool.next, pool.threads, memory_order_relaxed);
    announce();
    unsigned number = atomic_load_explicit(&pool.number, memory_order_relaxed);
    int failed = 0, polls = 0;
    for (int i = 0; i < pool.threads; i++) {
        for (; atomic_load_explicit(&members[i].done, memory_order_acquire) != number; polls++) {
            if ((!i || polls >= STEAL_SPINS) && take(i, number)) work(i, number);
            else if (polls < SPINS) relax();
            else sched_yield();
        }
        failed |= members[i].failed;
    }
    *took = now_ns() - start;
    pthread_mutex_unlock(&pool.launching);
    return failed ? -1 : 0;
}

typedef struct {
    int64_t type, value;
} Any;                    /* TVMFFIAny */

typedef struct {
    int (*kernel)(void *self, const Any *arguments, int32_t count, Any *result);
    const Any *arguments;
    int32_t count;
} Call;

/* Calls kernels in order. Returns the index of the first kernel that fails, or -1 if none fails. */
int mlc_amd_replay(const Call *calls, int count) {
    for (int i = 0; i < count; i++) {
        Any result = {0, 0};
        if (calls[i].kernel(NULL, calls[i].arguments, calls[i].count, &result)) return i;
    }
    return -1;
}

static _Thread_local struct {
    void *at;
    uint64_t bytes;
    int used;
} kept[KEPT];

static pthread_key_t keeps;     /* set for threads that keep buffers: they are freed when the thread ends */
static pthread_once_t keeping = PTHREAD_ONCE_INIT;

static void free_kept(void *unused) {
    (void)unused;
    for (int i = 0; i < KEPT; i++) {
        free(kept[i].at);
        kept[i].at = NULL;
    }
}

static void start_keeping(void) {
    if (pthread_key_create(&keeps, free_kept)) abort();     /* of 1024 keys, none is left */
}

/* TVMBackendAllocWorkspace: scratch memory of the calling thread. NULL if out of memory. */
void *mlc_amd_scratch(int device_type, int device, uint64_t bytes, int code, int bits) {
    (void)device_type, (void)device, (void)code, (void)bits;
    int best = -1, spare = -1;
    for (int i = 0; i < KEPT; i++) {
        if (kept[i].used) continue;
        if (!kept[i].at || kept[i].bytes < bytes) spare = i;        /* none yet, or too small */
        else if (best < 0 || kept[i].bytes < kept[best].bytes) best = i;
    }
    if (best < 0) {
        if (bytes > UINT64_MAX - ALIGN) return NULL;
        uint64_t rounded = bytes ? (bytes + ALIGN - 1) / ALIGN * ALIGN : ALIGN;
        void *at = aligned_alloc(ALIGN, rounded);
        if (!at || spare < 0) return at;
        pthread_once(&keeping, start_keeping);
        pthread_setspecific(keeps, kept);
        free(kept[spare].at);
        kept[spare].at = at;
        kept[spare].bytes = rounded;
        best = spare;
    }
    kept[best].used = 1;
    return kept[best].at;
}

/* TVMBackendFreeWorkspace. */
int mlc_amd_free_scratch(int device_type, int device, void *at) {
    (void)device_type, (void)device;
    for (int i = 0; i < KEPT; i++) {
        if (at && kept[i].at == at) {
            kept[i].used = 0;
            return 0;
        }
    }
    free(at);
    return 0;
}
