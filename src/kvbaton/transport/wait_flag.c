/* A thread that waits for a number in memory which a GPU writes when a copy is done, and then writes one byte to a descriptor.
   It looks without a pause for as long as a copy takes as a rule: a call of the driver, by an interrupt of the GPU, came 0.16 ms
   later. There is one number at a time. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define EAGER_NS 2000000
#define PAUSE_NS 50000
#define LOOKS 64

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t work;
    const volatile int32_t *flag; /* 0: nothing is waited for */
    int32_t wanted, seen;
    int wakeup, is_over;
    pthread_t thread;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void write_byte(int wakeup) {
    ssize_t written = write(wakeup, "", 1);
    (void)written;
}

/* Called with the lock, and returns with it: when the number is there, or something else is to be waited for. */
static void wait_for(struct waiter *waiter) {
    const volatile int32_t *flag = waiter->flag;
    int32_t wanted = waiter->wanted;
    int64_t eager_until = now_ns() + EAGER_NS;
    while (!waiter->is_over && waiter->flag == flag && waiter->wanted == wanted && *flag != wanted) {
        pthread_mutex_unlock(&waiter->lock);
        for (int look = 0; look < LOOKS && *flag != wanted; look++) rest();
        if (now_ns() > eager_until) nanosleep(&(struct timespec){0, PAUSE_NS}, 0);
        pthread_mutex_lock(&waiter->lock);
    }
}

static void *run(void *data) {
    struct waiter *waiter = data;
    pthread_mutex_lock(&waiter->lock);
    while (!waiter->is_over) {
        if (!waiter->flag) {
            pthread_cond_wait(&waiter->work, &waiter->lock);
            continue;
        }
        wait_for(waiter);
        if (waiter->is_over || !waiter->flag || *waiter->flag != waiter->wanted) continue;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        /* Both under the lock: what is woken by the byte sees the number, and what sees the number comes after the byte. */
        waiter->seen = waiter->wanted;
        waiter->flag = 0;
        write_byte(waiter->wakeup);
    }
    pthread_mutex_unlock(&waiter->lock);
    return 0;
}

struct waiter *open_waiter(void) {
    struct waiter *waiter = calloc(1, sizeof *waiter);
    if (!waiter) return 0;
    pthread_mutex_init(&waiter->lock, 0);
    pthread_cond_init(&waiter->work, 0);
    if (pthread_create(&waiter->thread, 0, run, waiter)) {
        free(waiter);
        return 0;
    }
    return waiter;
}

/* From now on wait for `wanted`, which is not 0, to appear at `flag`; 0 instead of `flag` ends the wait, and writes its byte. */
void wait_for_flag(struct waiter *waiter, const int32_t *flag, int32_t wanted, int wakeup) {
    pthread_mutex_lock(&waiter->lock);
    if (waiter->flag && !flag) write_byte(waiter->wakeup);
    waiter->flag = flag;
    waiter->wanted = wanted;
    waiter->wakeup = wakeup;
    pthread_cond_signal(&waiter->work);
    pthread_mutex_unlock(&waiter->lock);
}

/* The number that was seen last; the byte for it was written. */
int32_t seen_flag(struct waiter *waiter) {
    pthread_mutex_lock(&waiter->lock);
    int32_t seen = waiter->seen;
    pthread_mutex_unlock(&waiter->lock);
    return seen;
}

void close_waiter(struct waiter *waiter) {
    pthread_mutex_lock(&waiter->lock);
    waiter->is_over = 1;
    pthread_cond_signal(&waiter->work);
    pthread_mutex_unlock(&waiter->lock);
    pthread_join(waiter->thread, 0);
    pthread_cond_destroy(&waiter->work);
    pthread_mutex_destroy(&waiter->lock);
    free(waiter);
}
