/* The CPU's thread pool (runtime/devices/cpu.c) under load: several threads launch jobs, short and long, failing and nested, which take scratch
 * memory, while the pool is resized, sleeps and is forked. For the sanitizers; test_threads_sanitized.py builds and runs it.
 *
 * Arguments: rounds of each thread, whether to fork. Exit code 1 and a line for a wrong result.
 */
#include "cpu.c"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CALLERS = 3, SHARES = 8 * MAX_THREADS };

typedef struct {
    unsigned random;
    int kind;                           /* 0: short, 1: long, 2: fails, 3: nested, 4: scratch memory */
    atomic_int done[SHARES];            /* how often each task ran */
    atomic_int tasks;
} Work;

static int rounds;
static atomic_int wrong;

static int run(int task, Group *group, void *data);

static void check(int right, const char *what) {
    if (!right && !atomic_fetch_add(&wrong, 1)) printf("wrong: %s\n", what);
}

static int inner(int task, Group *group, void *data) {
    (void)group;
    ++*(int *)data;
    return task;
}

static int run(int task, Group *group, void *data) {
    Work *work = data;
    atomic_store_explicit(&work->tasks, group->tasks, memory_order_relaxed);
    atomic_fetch_add_explicit(&work->done[task], 1, memory_order_relaxed);
    if (work->kind == 1) {
        for (volatile int i = 0; i < 200000; i++) continue;
    } else if (work->kind == 3) {
        int count = 0;
        check(!mlc_amd_launch(inner, &count, 0) && count == 1, "a nested launch");
    } else if (work->kind == 4) {
        uint64_t sizes[] = {1, 1000, 100000, 5000, 0, 70000, 3, 1 << 20, 17, 999};
        char *taken[10];
        for (int i = 0; i < 10; i++) {
            taken[i] = mlc_amd_scratch(1, 0, sizes[i], 2, 32);
            memset(taken[i], i + 1, sizes[i]);
        }
        for (int i = 0; i < 10; i++) {
            check(!sizes[i] || (taken[i][0] == i + 1 && taken[i][sizes[i] - 1] == i + 1), "scratch memory");
            mlc_amd_free_scratch(1, 0, taken[i]);
        }
    }
    return work->kind == 2 && task == 0;
}

static void *caller(void *argument) {
    Work *work = argument;
    for (int round = 0; round < rounds; round++) {
        work->random = work->random * 1664525u + 1013904223u;
        work->kind = (work->random >> 16) % 5;
        memset(work->done, 0, sizeof work->done);
        check(mlc_amd_launch(run, work, 0) == (work->kind == 2 ? -1 : 0), "the result of a launch");
        for (int task = 0; task < work->tasks; task++) check(work->done[task] == 1, "each task runs once");
        if ((work->random >> 24) < 4) usleep(5000);     /* the others fall asleep */
    }
    return NULL;
}

int main(int count, char **arguments) {
    static Work works[CALLERS];
    pthread_t threads[CALLERS];
    rounds = count > 1 ? atoi(arguments[1]) : 1000;
    for (int i = 0; i < CALLERS; i++) {
        works[i].random = (unsigned)i + 1;
        if (pthread_create(&threads[i], NULL, caller, &works[i])) return 2;
    }
    for (int round = 0; round < 40; round++) {
        int wanted = 1 + round * 7 % 9;
        check(mlc_amd_start_threads(wanted) == wanted, "the number of threads");
        usleep(3000);
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
    if (count > 2 && atoi(arguments[2])) {
        mlc_amd_start_threads(3);
        pid_t child = fork();
        int status = 0, seen = 0;
        if (!child) _exit(mlc_amd_launch(inner, &seen, 0) || seen != 1);
        check(waitpid(child, &status, 0) == child && !status, "a forked process");
    }
    mlc_amd_start_threads(1);
    return atomic_load(&wrong) != 0;
}
