// Until the parts are there.
namespace memplan::planned {
extern const int placeholder = 0;
}
