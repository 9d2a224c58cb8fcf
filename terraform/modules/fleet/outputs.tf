output "hosts" {
  description = "Host name -> {pool, index, role, also, shape, gpus}: the pools, host by host."
  value       = local.hosts
}

output "shapes" {
  description = "The catalogue's rows of the shapes in use."
  value       = { for shape in distinct([for member in var.members : member.shape]) : shape => local.shapes[shape] }
}

output "hourly_cost" {
  description = "US dollars per hour: `known` is the sum over the shapes with a price, `without_price` lists the others, `figures` says what each figure is, of which day and from where."
  value = {
    known         = sum(concat([0], [for price in values(local.prices_known) : price if price != null]))
    without_price = distinct([for pool, price in local.prices_known : var.members[pool].shape if price == null])
    figures       = { for shape in distinct([for member in var.members : member.shape]) : shape => local.prices[shape] if contains(keys(local.prices), shape) }
  }
}
