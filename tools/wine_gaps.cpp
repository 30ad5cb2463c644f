// Functions that wine 8 lacks and wheels for Windows need. Windows has all of them. tools/check_windows_python.sh
// compiles this file as bcryptprimitives.dll, in the folder of python.exe.
// - ProcessPrng, for tokenizers and llguidance (Rust)
// - complex functions of the C library, for NumPy: wine's functions abort the program, so they are overwritten with
//   jumps to the functions below
#include <complex>
#include <cstring>
#include <windows.h>

extern "C" BOOLEAN NTAPI SystemFunction036(PVOID bytes, ULONG n_bytes);  // RtlGenRandom

extern "C" __declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T n_bytes) {
    return SystemFunction036(bytes, ULONG(n_bytes));
}

namespace {

// As Microsoft's C passes complex numbers; its long double is a double.
template <class Real>
struct Complex {
    Real real, imaginary;

    Complex(const std::complex<Real>& z) : real(z.real()), imaginary(z.imag()) {}
    operator std::complex<Real>() const { return {real, imaginary}; }
};

void replace(HMODULE library, const char* name, const char* suffix, void* function) {
    char full[32];
    auto* code = reinterpret_cast<unsigned char*>(GetProcAddress(library, strcat(strcpy(full, name), suffix)));
    DWORD protection;
    if (!code || !VirtualProtect(code, 12, PAGE_EXECUTE_READWRITE, &protection)) return;
    memcpy(code, "\x48\xb8", 2);  // mov rax, function
    memcpy(code + 2, &function, 8);
    memcpy(code + 10, "\xff\xe0", 2);  // jmp rax
}

template <class Real>
void replace_all(HMODULE library, const char* suffix) {
    using Z = Complex<Real>;
    using S = std::complex<Real>;
    auto real = [&](const char* name, Real (*function)(Z)) { replace(library, name, suffix, (void*)function); };
    auto complex = [&](const char* name, Z (*function)(Z)) { replace(library, name, suffix, (void*)function); };
    Z (*power)(Z, Z) = [](Z a, Z b) { return Z(std::pow(S(a), S(b))); };
    replace(library, "cpow", suffix, (void*)power);
    real("creal", [](Z z) { return z.real; });
    real("cimag", [](Z z) { return z.imaginary; });
    real("cabs", [](Z z) { return std::abs(S(z)); });
    real("carg", [](Z z) { return std::arg(S(z)); });
    complex("cexp", [](Z z) { return Z(std::exp(S(z))); });
    complex("clog", [](Z z) { return Z(std::log(S(z))); });
    complex("csqrt", [](Z z) { return Z(std::sqrt(S(z))); });
    complex("csin", [](Z z) { return Z(std::sin(S(z))); });
    complex("ccos", [](Z z) { return Z(std::cos(S(z))); });
    complex("ctan", [](Z z) { return Z(std::tan(S(z))); });
    complex("csinh", [](Z z) { return Z(std::sinh(S(z))); });
    complex("ccosh", [](Z z) { return Z(std::cosh(S(z))); });
    complex("ctanh", [](Z z) { return Z(std::tanh(S(z))); });
}

}  // namespace

BOOL WINAPI DllMain(HINSTANCE, DWORD reason, LPVOID) {
    if (reason == DLL_PROCESS_ATTACH) {
        HMODULE library = LoadLibraryA("ucrtbase.dll");
        replace_all<float>(library, "f");
        replace_all<double>(library, "");
        replace_all<double>(library, "l");
    }
    return TRUE;
}
