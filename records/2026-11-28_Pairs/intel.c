/* Preloaded, it lets MKL use its AVX2 code on AMD's processors, too. */
int mkl_serv_intel_cpu_true(void) { return 1; }
