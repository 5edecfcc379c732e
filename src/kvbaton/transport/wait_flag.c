/* A thread that waits for a number in memory which a GPU writes when a copy is done, and then writes one byte to a descriptor.
   It looks without a pause for as long as a copy takes as a rule: a call of the driver, by an interrupt of the GPU, came 0.16 ms
   later. There is one number at a time.

   A sleeping thread takes 20 to 60 us from the byte until its code runs again, as long as a fifth of a copy. So where it is known how long
   copies take, the byte is written before the end: the thread that it wakes waits for the rest without sleeping (`linger`), for a bounded
   time. The end has a byte of its own, unless that thread is there to see it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define EAGER_NS 2000000
#define PAUSE_NS 50000
#define LOOKS 64
#define LEAD_NS 60000
#define LEAST_NS 120000 /* copies that take less are over before a thread could be woken early */

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t work;
    const volatile int32_t *flag; /* 0: nothing is waited for */
    int32_t wanted, seen;
    int wakeup, is_over;
    uint64_t bytes; /* of the copy; 0: it is not measured */
    int64_t begun_ns, early_ns; /* when the byte is due that comes before the end; 0: there is none */
    double ns_per_byte;         /* as copies took lately; 0: not known */
    int is_near;                /* that byte was written, and no thread has waited for the end yet */
    int lingers;                /* one does, and needs no byte */
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
        int64_t now = now_ns();
        if (now > eager_until) nanosleep(&(struct timespec){0, PAUSE_NS}, 0);
        pthread_mutex_lock(&waiter->lock);
        if (waiter->early_ns && now >= waiter->early_ns && waiter->wanted == wanted && *flag != wanted) {
            waiter->early_ns = 0;
            /* In this order: what sees that the end is near takes the byte, and one that came later would stay. */
            write_byte(waiter->wakeup);
            __atomic_store_n(&waiter->is_near, 1, __ATOMIC_RELEASE);
        }
    }
}

/* A copy has ended. What is expected follows a quicker one at once, and a slower one by and by: too early costs `linger` its time, too late
   only what waking takes. */
static void learn(struct waiter *waiter) {
    if (!waiter->bytes) return;
    double took = (double)(now_ns() - waiter->begun_ns) / (double)waiter->bytes;
    if (!waiter->ns_per_byte || took < waiter->ns_per_byte) waiter->ns_per_byte = took;
    else waiter->ns_per_byte += (took - waiter->ns_per_byte) / 4;
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
        learn(waiter);
        waiter->seen = waiter->wanted;
        __atomic_store_n(&waiter->is_near, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&waiter->flag, 0, __ATOMIC_RELEASE);
        if (!waiter->lingers) write_byte(waiter->wakeup);
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

/* From now on wait for `wanted`, which is not 0, to appear at `flag`, at the end of a copy of so many bytes, 0 if that is not to be measured;
   0 instead of `flag` ends the wait, and writes its byte. */
void wait_for_flag(struct waiter *waiter, const int32_t *flag, int32_t wanted, int wakeup, uint64_t bytes) {
    pthread_mutex_lock(&waiter->lock);
    if (waiter->flag && !flag) write_byte(waiter->wakeup);
    double expected_ns = waiter->ns_per_byte * (double)bytes;
    waiter->begun_ns = now_ns();
    waiter->early_ns = expected_ns >= LEAST_NS && expected_ns < EAGER_NS ? waiter->begun_ns + (int64_t)expected_ns - LEAD_NS : 0;
    waiter->bytes = bytes;
    __atomic_store_n(&waiter->is_near, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&waiter->flag, flag, __ATOMIC_RELEASE);
    waiter->wanted = wanted;
    waiter->wakeup = wakeup;
    pthread_cond_signal(&waiter->work);
    pthread_mutex_unlock(&waiter->lock);
}

/* Whether a byte was written because the end is near, and no thread has lingered since. */
int is_near(struct waiter *waiter) { return __atomic_load_n(&waiter->is_near, __ATOMIC_ACQUIRE); }

/* Where the end is near, wait for it without sleeping, at most `most_ns`, once. Returns whether it came meanwhile, and then it has no byte of
   its own; in every other case it has. */
int linger(struct waiter *waiter, int64_t most_ns) {
    pthread_mutex_lock(&waiter->lock);
    int32_t wanted = waiter->wanted;
    int waits = waiter->is_near && waiter->flag;
    __atomic_store_n(&waiter->is_near, 0, __ATOMIC_RELEASE);
    waiter->lingers = waits;
    pthread_mutex_unlock(&waiter->lock);
    if (!waits) return 0;
    int64_t until = now_ns() + most_ns;
    while (__atomic_load_n(&waiter->flag, __ATOMIC_ACQUIRE) && now_ns() < until)
        for (int look = 0; look < 4; look++) rest();
    pthread_mutex_lock(&waiter->lock);
    waiter->lingers = 0;
    int has_ended = waiter->seen == wanted;
    pthread_mutex_unlock(&waiter->lock);
    return has_ended;
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
