/* Looks at an epoll again and again for a bounded time, where to sleep and to be woken would take longer than the wait. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <time.h>

/* A processor that was left to another thread, and came back this much later, is needed by it: then to look costs that thread its
   time, and to wake a sleeper on a processor that is not asleep costs little. */
#define NEEDED_NS 200000

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Returns 1 when anything that this epoll watches is ready, 0 when it is not within `longest_ns`, -1 if it is no epoll. */
int busy_poll(int epoll, int64_t longest_ns) {
    struct epoll_event ready;
    int64_t now = monotonic_ns(), until = now + longest_ns;
    for (;;) {
        int count = epoll_wait(epoll, &ready, 1, 0);
        if (count || now >= until) return count;
        int64_t left_at = now;
        sched_yield();
        now = monotonic_ns();
        if (now - left_at > NEEDED_NS) return epoll_wait(epoll, &ready, 1, 0);
    }
}
