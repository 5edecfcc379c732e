/* What `tools/gpu_stages.py` puts in front of the driver's calls: each notes when it was called, and a thread that does nothing else notes
   when the GPU has written the numbers before the kernel and behind it. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum { ENTERED, TABLE_QUEUED, KERNEL_QUEUED, NUMBER_QUEUED, KERNEL_BEGAN, NUMBER_WRITTEN, STAGES };

typedef int enter_call(void *), leave_call(void **), bring_call(uint64_t, const void *, size_t, void *);
typedef int launch_call(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int write_call(void *, uint64_t, uint32_t, unsigned);

int64_t noted_ns[STAGES];
void *driver[5];         /* in the order of CALLS in quick_start.py */
uint64_t began_flag = 0; /* where a number is to be written before the kernel; 0: nowhere, since that takes its time too */
static uint32_t began_number;
static const volatile int32_t *volatile flags[2];
static volatile int32_t wanted[2];
static volatile int is_over;
static pthread_t watcher;

static void note(int stage) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    noted_ns[stage] = now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void *watch(void *unused) {
    while (!is_over)
        for (int each = 0; each < 2; each++)
            if (wanted[each] && *flags[each] == wanted[each]) {
                note(KERNEL_BEGAN + each);
                wanted[each] = 0;
            }
    return unused;
}

int start_watch(void) { return pthread_create(&watcher, 0, watch, 0); }

void stop_watch(void) {
    is_over = 1;
    pthread_join(watcher, 0);
}

static int write_watched(int which, void *stream, uint64_t flag, uint32_t number, unsigned options) {
    flags[which] = (const volatile int32_t *)flag;
    wanted[which] = (int32_t)number;
    return ((write_call *)driver[4])(stream, flag, number, options);
}

int noted_enter(void *context) {
    note(ENTERED);
    return ((enter_call *)driver[0])(context);
}

int noted_leave(void **context) { return ((leave_call *)driver[1])(context); }

int noted_bring(uint64_t target, const void *source, size_t bytes, void *stream) {
    int code = ((bring_call *)driver[2])(target, source, bytes, stream);
    note(TABLE_QUEUED);
    return code;
}

int noted_launch(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned b, unsigned c, unsigned shared, void *stream,
                 void **params, void **extra) {
    int code = began_flag ? write_watched(0, stream, began_flag, ++began_number, 0) : 0;
    if (!code) code = ((launch_call *)driver[3])(function, x, y, z, threads, b, c, shared, stream, params, extra);
    note(KERNEL_QUEUED);
    return code;
}

int noted_write(void *stream, uint64_t flag, uint32_t number, unsigned options) {
    int code = write_watched(1, stream, flag, number, options);
    note(NUMBER_QUEUED);
    return code;
}
