// SPDX-License-Identifier: MIT OR Apache-2.0
// Works in functions one after the other, and prints how much CPU time each took: name and nanoseconds. The argument is
// the total in milliseconds; with a second one it never ends.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// As an option, a function may be without a name in a stripped program.
#ifndef MAYBE_STATIC
#define MAYBE_STATIC
#endif

static volatile uint64_t sink;
static char buffer[1 << 17];
static int zeros;

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

MAYBE_STATIC __attribute__((noipa)) void alpha(void)
{
    uint64_t x = sink;
    for (int i = 0; i < 20000; i++)
        x = x * 6364136223846793005ull + 1;
    sink = x;
}

__attribute__((noipa)) void beta(void)
{
    uint64_t x = sink;
    for (int i = 0; i < 20000; i++)
        x = (x ^ x >> 7) + 0x9e3779b97f4a7c15ull;
    sink = x;
}

// Clears the buffer in the kernel.
__attribute__((noipa)) void gamma_reads(void)
{
    if (read(zeros, buffer, sizeof(buffer)) != (ssize_t)sizeof(buffer))
        exit(1);
    sink += buffer[0];
}

__attribute__((noipa)) uint64_t repeat(void (*work)(void), uint64_t for_ns)
{
    uint64_t from = cpu_ns(), now = from;
    while (now - from < for_ns) {
        work();
        now = cpu_ns();
    }
    return now - from;
}

int main(int count, char **arguments)
{
    uint64_t total_ns = strtoull(arguments[1], NULL, 10) * 1000000ull;
    zeros = open("/dev/zero", O_RDONLY);
    memset(buffer, 1, sizeof(buffer));
    // Short rounds, as the period of samples may change; none is a multiple of it.
    uint64_t a = 0, b = 0, c = 0;
    while (count > 2 || a + b + c < total_ns) {
        a += repeat(alpha, 3700000);
        b += repeat(beta, 2200000);
        c += repeat(gamma_reads, 1500000);
    }
    printf("alpha %llu\nbeta %llu\nread %llu\n", (unsigned long long)a, (unsigned long long)b, (unsigned long long)c);
    return 0;
}
